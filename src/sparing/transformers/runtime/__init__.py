"""What happens when a model calls sparing for its attention: `function` sorts a call into one of four handlers."""
