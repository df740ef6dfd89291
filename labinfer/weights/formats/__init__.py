"""Storage formats of matrices in checkpoints; one file per format."""
