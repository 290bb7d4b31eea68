//! The tracer on the real wheels.
