"""Model families and layers beyond the core; a family is imported when a checkpoint needs it."""
