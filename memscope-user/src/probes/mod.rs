//! The catalogue of probed sites, and the resolvers that turn a row into (file, offset).
