"""What the one-shot tools share: session, options, call stacks, histograms and output."""
