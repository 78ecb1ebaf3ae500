"""What traces of locks say: numbers and pictures of the records that `lockd trace` writes."""
