"""Server: the gateway, the engine host on rank 0, the link between them, the supervisor and the web pages."""
