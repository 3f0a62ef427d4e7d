//! The bytes of GGUF, version 3, little-endian: a magic word, counts, keys with values,
//! descriptions of tensors, data. Strings and arrays have their length in 64 bits before them;
//! dimensions go from the fastest to the slowest.

use nvfp4_spec::gguf::{BLOCK_BYTES, BLOCK_ELEMENTS};
use std::fmt;

pub(super) const MAGIC: [u8; 4] = *b"GGUF";
pub(super) const VERSION: u32 = 3;

/// What the start of every tensor is a multiple of, unless a file says otherwise.
pub(super) const ALIGNMENT: u64 = 32;

/// What a tensor's elements are stored as: llama.cpp's number for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Type(pub u32);

impl Type {
    /// Binary32.
    pub const F32: Type = Type(0);
    /// Binary16.
    pub const F16: Type = Type(1);
    /// BF16.
    pub const BF16: Type = Type(30);
    /// NVFP4.
    pub const NVFP4: Type = Type(40);

    /// Name, elements of a block and bytes of a block, for the types that are known here.
    fn known(self) -> Option<(&'static str, u64, u64)> {
        Some(match self.0 {
            0 => ("F32", 1, 4),
            1 => ("F16", 1, 2),
            2 => ("Q4_0", 32, 18),
            3 => ("Q4_1", 32, 20),
            6 => ("Q5_0", 32, 22),
            7 => ("Q5_1", 32, 24),
            8 => ("Q8_0", 32, 34),
            9 => ("Q8_1", 32, 36),
            10 => ("Q2_K", 256, 84),
            11 => ("Q3_K", 256, 110),
            12 => ("Q4_K", 256, 144),
            13 => ("Q5_K", 256, 176),
            14 => ("Q6_K", 256, 210),
            15 => ("Q8_K", 256, 292),
            16 => ("IQ2_XXS", 256, 66),
            17 => ("IQ2_XS", 256, 74),
            18 => ("IQ3_XXS", 256, 98),
            19 => ("IQ1_S", 256, 50),
            20 => ("IQ4_NL", 32, 18),
            21 => ("IQ3_S", 256, 110),
            22 => ("IQ2_S", 256, 82),
            23 => ("IQ4_XS", 256, 136),
            24 => ("I8", 1, 1),
            25 => ("I16", 1, 2),
            26 => ("I32", 1, 4),
            27 => ("I64", 1, 8),
            28 => ("F64", 1, 8),
            29 => ("IQ1_M", 256, 56),
            30 => ("BF16", 1, 2),
            34 => ("TQ1_0", 256, 54),
            35 => ("TQ2_0", 256, 66),
            39 => ("MXFP4", 32, 17),
            40 => ("NVFP4", BLOCK_ELEMENTS as u64, BLOCK_BYTES as u64),
            _ => return None,
        })
    }

    /// Bytes of a tensor; `None` if its rows are not whole blocks, if 64 bits cannot count them, or
    /// if the type is unknown.
    pub(super) fn byte_len(self, dims: &[u64]) -> Option<u64> {
        let (_, elements, bytes) = self.known()?;
        let first = dims.first().copied().unwrap_or(1);
        let count = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
        first.is_multiple_of(elements).then(|| (count / elements).checked_mul(bytes))?
    }

    pub(super) fn is_known(self) -> bool {
        self.known().is_some()
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known() {
            Some((name, ..)) => f.write_str(name),
            None => write!(f, "type {}", self.0),
        }
    }
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An unsigned number of at most 32 bits.
    U32(u32),
    /// A signed number of at most 32 bits.
    I32(i32),
    /// A number of 64 bits, as a whole number.
    Long(i128),
    /// A binary32 number.
    F32(f32),
    /// A binary64 number.
    F64(f64),
    /// Yes or no.
    Bool(bool),
    /// Text.
    Text(String),
    /// An array of text.
    Texts(Vec<String>),
    /// An array of signed 32-bit numbers.
    I32s(Vec<i32>),
    /// An array of binary32 numbers.
    F32s(Vec<f32>),
    /// An array of another type, of this length, which is not kept.
    Skipped(u64),
}

impl Value {
    /// A whole number that is not negative.
    pub fn number(&self) -> Option<u64> {
        match *self {
            Value::U32(n) => Some(n.into()),
            Value::I32(n) => n.try_into().ok(),
            Value::Long(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// Text.
    pub fn text(&self) -> Option<&str> {
        if let Value::Text(text) = self { Some(text) } else { None }
    }
}

/// The numbers that types of values have in a file.
pub(super) mod tag {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const TEXT: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

/// A tensor to be described.
#[derive(Clone, Debug)]
pub(super) struct Described {
    pub name: String,
    pub kind: Type,
    /// From the fastest to the slowest.
    pub dims: Vec<u64>,
}

/// The first bytes of a file up to its tensors, where each tensor starts, and how long the file is.
pub(super) fn header(entries: &[(String, Value)], tensors: &[Described]) -> (Vec<u8>, Vec<u64>, u64) {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((entries.len() as u64).to_le_bytes());
    for (key, value) in entries {
        text(&mut out, key);
        put(&mut out, value);
    }
    let (mut at, mut starts) = (0u64, Vec::new());
    for tensor in tensors {
        text(&mut out, &tensor.name);
        out.extend((tensor.dims.len() as u32).to_le_bytes());
        tensor.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
        out.extend(tensor.kind.0.to_le_bytes());
        out.extend(at.to_le_bytes());
        starts.push(at);
        let len = tensor.kind.byte_len(&tensor.dims).expect("what is written has whole blocks of a known type");
        at += len.next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
    let front = out.len() as u64;
    (out, starts.into_iter().map(|s| s + front).collect(), front + at)
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Writes a value after the tag of its type. What is only ever read is written as an empty array.
fn put(out: &mut Vec<u8>, value: &Value) {
    let array = |out: &mut Vec<u8>, of: u32, len: usize| {
        out.extend([tag::ARRAY, of].into_iter().flat_map(u32::to_le_bytes));
        out.extend((len as u64).to_le_bytes());
    };
    let mut scalar = |tag: u32, bytes: &[u8]| {
        out.extend(tag.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U32(n) => scalar(tag::U32, &n.to_le_bytes()),
        Value::I32(n) => scalar(tag::I32, &n.to_le_bytes()),
        Value::F32(x) => scalar(tag::F32, &x.to_le_bytes()),
        Value::F64(x) => scalar(tag::F64, &x.to_le_bytes()),
        Value::Long(n) => scalar(tag::I64, &(*n as i64).to_le_bytes()),
        Value::Bool(b) => scalar(tag::BOOL, &[u8::from(*b)]),
        Value::Text(t) => {
            out.extend(tag::TEXT.to_le_bytes());
            text(out, t);
        }
        Value::Texts(texts) => {
            array(out, tag::TEXT, texts.len());
            texts.iter().for_each(|t| text(out, t));
        }
        Value::I32s(numbers) => {
            array(out, tag::I32, numbers.len());
            numbers.iter().for_each(|n| out.extend(n.to_le_bytes()));
        }
        Value::F32s(numbers) => {
            array(out, tag::F32, numbers.len());
            numbers.iter().for_each(|n| out.extend(n.to_le_bytes()));
        }
        Value::Skipped(_) => array(out, tag::U8, 0),
    }
}
