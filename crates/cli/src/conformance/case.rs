//! A golden case: a safetensors file with string metadata, every access checked.

use anyhow::{Context, Result, anyhow, bail};
use half::{bf16, f16};
use nvfp4::Elements;
use nvfp4_spec::matrix::Matrix;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::Path;

/// A dimension beyond this is refused: a file can claim any size for a tensor without elements.
const MAX_DIMENSION: usize = 1 << 24;

pub struct Case {
    metadata: HashMap<String, String>,
    tensors: HashMap<String, Tensor>,
}

pub struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Case {
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(&nvfp4_files::regular::read(path, u64::MAX).context("cannot read the file")?)
    }

    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let (_, header) = SafeTensors::read_metadata(bytes).context("not a valid safetensors file")?;
        let file = SafeTensors::deserialize(bytes).context("not a valid safetensors file")?;
        let mut tensors = HashMap::new();
        for (name, view) in file.iter() {
            if let Some(dimension) = view.shape().iter().find(|&&d| d > MAX_DIMENSION) {
                bail!("tensor '{name}': a dimension of {dimension} is too large for a golden case");
            }
            let tensor = Tensor { dtype: view.dtype(), shape: view.shape().to_vec(), bytes: view.data().to_vec() };
            tensors.insert(name.to_string(), tensor);
        }
        Ok(Case { metadata: header.metadata().clone().unwrap_or_default(), tensors })
    }

    pub fn meta(&self, key: &str) -> Result<&str> {
        self.metadata.get(key).map(String::as_str).ok_or_else(|| anyhow!("metadata '{key}' is missing"))
    }

    /// A metadata value that must be one of a few.
    pub fn choice<T: Copy>(&self, key: &str, choices: &[(&str, T)]) -> Result<T> {
        let value = self.meta(key)?;
        choices.iter().find(|(name, _)| *name == value).map(|&(_, choice)| choice).ok_or_else(|| {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            anyhow!("metadata '{key}': expected one of {}, got '{value}'", names.join(", "))
        })
    }

    pub fn flag(&self, key: &str) -> Result<bool> {
        self.choice(key, &[("True", true), ("False", false)])
    }

    pub fn number(&self, key: &str) -> Result<usize> {
        let value = self.meta(key)?;
        value.parse().with_context(|| format!("metadata '{key}': expected a number, got '{value}'"))
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| anyhow!("tensor '{name}' is missing"))
    }

    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let tensor = self.tensor(name)?;
        tensor.expect(name, Dtype::U8)?;
        Ok(&tensor.bytes)
    }

    pub fn f32s(&self, name: &str) -> Result<Vec<f32>> {
        let tensor = self.tensor(name)?;
        tensor.expect(name, Dtype::F32)?;
        Ok(tensor.decode(f32::from_le_bytes))
    }

    pub fn u64s(&self, name: &str) -> Result<Vec<u64>> {
        let tensor = self.tensor(name)?;
        tensor.expect(name, Dtype::I64)?;
        Ok(tensor.decode(u64::from_le_bytes))
    }

    pub fn u32s(&self, name: &str) -> Result<Vec<u32>> {
        let tensor = self.tensor(name)?;
        tensor.expect(name, Dtype::I32)?;
        Ok(tensor.decode(u32::from_le_bytes))
    }

    /// The rows and columns of a two-dimensional tensor.
    pub fn shape2(&self, name: &str) -> Result<(usize, usize)> {
        match self.tensor(name)?.shape[..] {
            [rows, cols] => Ok((rows, cols)),
            ref shape => bail!("tensor '{name}': expected two dimensions, got the shape {shape:?}"),
        }
    }

    /// The elements of a floating-point tensor in its own type.
    pub fn elements(&self, name: &str) -> Result<Elements> {
        let tensor = self.tensor(name)?;
        Ok(match tensor.dtype {
            Dtype::F32 => Elements::F32(tensor.decode(f32::from_le_bytes)),
            Dtype::BF16 => Elements::Bf16(tensor.decode(|b| bf16::from_bits(u16::from_le_bytes(b)))),
            Dtype::F16 => Elements::F16(tensor.decode(|b| f16::from_bits(u16::from_le_bytes(b)))),
            other => bail!("tensor '{name}': expected F32, BF16 or F16, got {other:?}"),
        })
    }

    pub fn matrix(&self, name: &str) -> Result<Matrix> {
        let (rows, cols) = self.shape2(name)?;
        Ok(match self.elements(name)? {
            Elements::F32(x) => Matrix::new(rows, cols, &x)?,
            Elements::Bf16(x) => Matrix::new(rows, cols, &x)?,
            Elements::F16(x) => Matrix::new(rows, cols, &x)?,
        })
    }
}

impl Tensor {
    fn expect(&self, name: &str, dtype: Dtype) -> Result<()> {
        if self.dtype != dtype {
            bail!("tensor '{name}': expected {dtype:?}, got {:?}", self.dtype);
        }
        Ok(())
    }

    fn decode<T, const N: usize>(&self, decode: impl Fn([u8; N]) -> T) -> Vec<T> {
        self.bytes.as_chunks::<N>().0.iter().map(|&chunk| decode(chunk)).collect()
    }
}
