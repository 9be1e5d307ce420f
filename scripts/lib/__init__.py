"""Code that several scripts share: options, output, ranks, the training job and its data."""
