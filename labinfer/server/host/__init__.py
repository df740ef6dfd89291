"""Engine host: runs the gateway's requests on the engines of rank 0, and sends tokens and stats back."""
