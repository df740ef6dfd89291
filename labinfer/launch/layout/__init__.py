"""The parts of a model that each rank holds: layers, weights, KV blocks; known before anything is loaded."""
