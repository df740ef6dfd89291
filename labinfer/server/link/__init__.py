"""Link: the frames between the gateway and the engine host, and the socket that carries them."""
