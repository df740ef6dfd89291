"""C++ beside Python: compiled on the machine it runs on. Nothing here knows what the functions do."""
