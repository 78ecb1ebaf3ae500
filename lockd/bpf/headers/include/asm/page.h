/* Stub: named by bcc, which brings its own copy of the definitions. */
