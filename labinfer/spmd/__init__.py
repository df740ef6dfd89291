"""Where am I, and who are my peers: the launch environment, the topology and this machine's resources."""
