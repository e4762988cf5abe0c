"""One call of attention by a model; `function` passes it to a handler: exact, prefill, decode or projection."""
