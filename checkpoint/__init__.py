"""All that is read from a model folder, untrusted: name, config, tensors, vocabulary, chat template."""
