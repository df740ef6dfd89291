"""From a joined group of ranks to workers that can run: layout, links, weights, measurements."""
