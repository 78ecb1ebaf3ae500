"""What the one-shot tools share: session, options, stacks, histograms and output formats."""
