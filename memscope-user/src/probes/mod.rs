//! The catalogue of probed sites, and the resolvers that turn a row into (file, offset).

pub mod cache;
pub mod catalogue;
pub mod elf;
mod flow;
mod image;
pub mod mstx_python;
mod python_methods;
pub mod resolve;
pub mod torch_npu;
