"""`lockd analyze`: statistics and pictures of the records that `lockd trace` writes."""
