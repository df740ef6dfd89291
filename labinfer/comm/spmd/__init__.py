"""This process's place among its peers: the launch environment, the topology, and the machine's resources."""
