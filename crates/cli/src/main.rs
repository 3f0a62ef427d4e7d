//! The nvfp4 command line.
fn main() {}
