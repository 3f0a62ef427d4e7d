//! GGUF, llama.cpp's file format: one file that holds the tensors, the model's parameters and its
//! tokenizer.
//!
//! Read in this order: `container` (what the bytes mean), `file` (a file, checked and read),
//! `family` (which models), `sizes` (what shapes their tensors have), `names` (what the tensors are
//! called), `rope` and `parameters` (what the configuration becomes), `tokens`, `bpe` and
//! `tokenizer`, `layout` (where everything goes), `verify`. `object` reads what JSON files say by
//! type.
//!
//! An NVFP4 weight is a tensor of type 40, blocks of 64 elements ([`nvfp4_spec::gguf`]), and a
//! tensor `….scale` with the tensor scale, which llama.cpp multiplies a product by. Experts of a
//! layer are one tensor with a scale for each.

mod bpe;
mod container;
mod family;
mod file;
mod layout;
mod names;
mod object;
mod parameters;
mod rope;
mod sizes;
mod tokenizer;
mod tokens;
mod verify;

pub use container::{Type, Value};
pub use file::{GgufFile, GgufTensor, check_gguf, is_gguf};
#[doc(hidden)]
pub use tokenizer::check_tokenizer;
pub use verify::verify;

pub(super) use layout::{FILE, check_parameters, lay_out};
pub(crate) use names::layer_parts;
pub(crate) use sizes::FeedForward;
