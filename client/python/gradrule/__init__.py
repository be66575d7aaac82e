"""gradrule: gradients with rules of your own, as a service."""
