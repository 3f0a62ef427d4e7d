//! GPTQ with fixed scales: the factor of a layer's inputs, and the codes of rows. **Exact**: the
//! rules are [`nvfp4_spec::gptq`], whose order of subtractions every element keeps, however the work
//! is divided into blocks and threads.

mod factor;
mod rows;
mod subtract;

pub use factor::{bytes, factor};
pub use rows::codes;
