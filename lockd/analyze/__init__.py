"""`lockd analyze`: numbers and pictures of the records that `lockd trace` writes."""
