//! The text of a kernel: the constants of `spec`, the rules, the settings of one variant, the
//! operation's own files.

use super::compile::Source;
use super::device::Device;
use super::kernel::Kernel;
use super::{Result, lock};
use nvfp4_spec::fp8::Format;
use nvfp4_spec::{Precision, e2m1, e4m3, e5m2, e8m0, fp8, hadamard, philox, profile, scale};
use std::collections::HashMap;
use std::fmt::Write;
use std::hash::Hash;
use std::sync::Mutex;

/// The rules of `spec`, to come after [`constants`]. A C++ compiler for the host builds the same
/// text.
pub const RULES: &str = include_str!("rules.cuh");

/// The rules of FP8 and MXFP8, to come after [`RULES`].
pub const FP8_RULES: &str = include_str!("fp8_rules.cuh");

/// Elements in the registers of a thread, to come after [`RULES`].
pub(crate) const ELEMENTS: &str = include_str!("elements.cuh");

/// NVFP4 codes of weights in bf16, to come after [`ELEMENTS`].
pub(crate) const WEIGHTS: &str = include_str!("weights.cuh");

/// Those of tokens, to come after [`WEIGHTS`].
pub(crate) const TOKENS: &str = include_str!("tokens.cuh");

/// The constants that [`RULES`] and [`FP8_RULES`] use, printed from the Rust ones.
pub fn constants() -> String {
    // The shortest decimal that reads back as the same binary32 number.
    let float = |x: f32| format!("{x:e}f");
    let mut text =
        "#ifdef __CUDACC__\n#define TABLE static __device__ constexpr\n#else\n#define TABLE static constexpr\n\
                    #endif\n"
            .to_string();
    for (name, value) in [
        ("E4M3_MAX", e4m3::MAX),
        ("E4M3_MIN_NORMAL", e4m3::MIN_NORMAL),
        ("E4M3_MIN_POSITIVE", e4m3::MIN_POSITIVE),
        ("E5M2_MAX", e5m2::MAX),
        ("E5M2_MIN_NORMAL", e5m2::MIN_NORMAL),
        ("BF16_MAX", Precision::Bf16.max()),
        ("F16_MAX", Precision::F16.max()),
        ("SIXTH", scale::SIXTH),
        ("HADAMARD_FACTOR", hadamard::FACTOR),
    ] {
        writeln!(text, "[[maybe_unused]] constexpr float {name} = {};", float(value)).expect("a string takes all");
    }
    for (name, value) in [
        ("E2M1_SIGN", u32::from(e2m1::SIGN)),
        ("E4M3_NAN_BYTE", e4m3::NAN_BYTE.into()),
        ("E4M3_MIN_NORMAL_BYTE", e4m3::MIN_NORMAL_BYTE.into()),
        ("E4M3_MANTISSA", e4m3::MANTISSA as u32),
        ("E5M2_MANTISSA", e5m2::MANTISSA as u32),
        ("E5M2_NAN_BYTE", e5m2::NAN_BYTE.into()),
        ("E8M0_MAX_BYTE", e8m0::MAX_BYTE.into()),
        ("E8M0_NAN_BYTE", e8m0::NAN_BYTE.into()),
        ("FP8_BLOCK", fp8::BLOCK as u32),
        ("MX_BLOCK", fp8::MX_BLOCK as u32),
        ("LLM_COMPRESSOR_ZERO", profile::LLM_COMPRESSOR_ZERO.into()),
        ("PHILOX_ROUNDS", philox::ROUNDS as u32),
    ] {
        writeln!(text, "[[maybe_unused]] constexpr unsigned {name} = {value};").expect("a string takes all");
    }
    let join = |items: Vec<String>| items.join(", ");
    let words = |words: [u32; 2]| join(words.iter().map(|w| format!("{w:#x}")).collect());
    let firsts = join(e2m1::FIRSTS.iter().map(|&x| float(x)).collect());
    writeln!(text, "TABLE float E2M1_FIRSTS[7] = {{{firsts}}};").expect("a string takes all");
    for (name, values) in [("PHILOX_MULTIPLIERS", philox::MULTIPLIERS), ("PHILOX_KEY_STEPS", philox::KEY_STEPS)] {
        writeln!(text, "TABLE unsigned {name}[2] = {{{}}};", words(values)).expect("a string takes all");
    }
    text
}

/// Every element type.
pub(crate) const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];

/// The name of an element type in kernel text.
pub(crate) fn precision(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "F32",
        Precision::Bf16 => "BF16",
        Precision::F16 => "F16",
    }
}

/// A whole text; `settings` are the declarations that `files` rely on.
pub(crate) fn assemble(settings: &str, files: &[&str]) -> String {
    let mut text = constants();
    for part in [RULES, settings].iter().chain(files) {
        text.push_str(part);
        text.push('\n');
    }
    text
}

/// A whole text with the FP8 rules and the elements before `files`.
pub(crate) fn assemble_fp8(settings: &str, files: &[&str]) -> String {
    assemble(&[FP8_RULES, settings, ELEMENTS].join("\n"), files)
}

/// The name of a code format in kernel text.
pub(crate) fn format(format: Format) -> &'static str {
    match format {
        Format::E4m3 => "E4M3",
        Format::E5m2 => "E5M2",
    }
}

/// A variant as text, with the source that `source` makes of it.
pub(crate) fn entry<V: Copy + std::fmt::Debug>(
    variant: V,
    source: impl Fn(V) -> (&'static str, &'static str, String),
) -> (String, Source) {
    let (name, function, text) = source(variant);
    (format!("{function} {variant:?}"), Source { name, text })
}

/// The kernels of an operation that are loaded, by GPU and variant `V`.
pub(crate) struct Variants<V>(Mutex<Option<HashMap<(usize, V), Kernel>>>);

impl<V: Copy + Eq + Hash> Variants<V> {
    pub const fn new() -> Self {
        Variants(Mutex::new(None))
    }

    /// The kernel of a variant; the first time, `source` makes its name, function and text.
    pub fn get(
        &self,
        device: Device,
        variant: V,
        source: impl FnOnce(V) -> (&'static str, &'static str, String),
    ) -> Result<Kernel> {
        let key = (device.ordinal(), variant);
        if let Some(&kernel) = lock(&self.0).get_or_insert_default().get(&key) {
            return Ok(kernel);
        }
        let (name, function, mut text) = source(variant);
        if device.portable() {
            text.insert_str(0, "#define PORTABLE\n");
        }
        let kernel = device.kernel(name, function, &text)?;
        lock(&self.0).get_or_insert_default().insert(key, kernel);
        Ok(kernel)
    }
}
