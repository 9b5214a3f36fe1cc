"""All that is read from a model folder: name, config, tensors, vocabulary, template. Untrusted."""
