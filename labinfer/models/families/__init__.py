"""Model families and layers beyond the core: a family is imported where a checkpoint is one of it."""
