//! How bytes move between registered memory: the vocabulary.
