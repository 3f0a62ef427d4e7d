//! Second moments of activations, from a file of statistics that `nvfp4 calibrate` writes. Nothing
//! in it is believed before it is checked, and a matrix is in memory only while it is used.

use super::file::{TensorFile, TensorInfo};
use crate::{Error, Result};
use nvfp4_spec::BLOCK;
use safetensors::Dtype;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// An open file of statistics. A name is that of a module and one of the endings here.
#[derive(Debug)]
pub struct Moments {
    file: TensorFile,
    index: BTreeMap<String, usize>,
    about: About,
}

/// What a file says about itself.
#[derive(Debug, Deserialize)]
struct About {
    /// Modules that have the matrices of another, because their input is the same.
    #[serde(default)]
    same_input: BTreeMap<String, String>,
}

impl Moments {
    /// What a file of statistics says that it is.
    pub const MARK: &'static str = "nvfp4-calibration";
    /// The largest magnitude of a module's input.
    pub const AMAX: &'static str = ".input_amax";
    /// The mean square of each column of it.
    pub const MEAN_SQUARES: &'static str = ".input_mean_square";
    /// For each block of 16 columns the means of their products with each other.
    pub const BLOCK_HESSIANS: &'static str = ".input_block_hessian";
    /// The means of the products of all columns with each other.
    pub const HESSIAN: &'static str = ".input_hessian";
    /// How many tokens went to each expert of a layer.
    pub const EXPERT_TOKENS: &'static str = ".expert_tokens";

    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = TensorFile::open(path)?;
        let wrong = |reason: &str| Error::content(path, format!("{reason}; make it with `nvfp4 calibrate`"));
        let about = file.metadata().get(Self::MARK).ok_or_else(|| wrong("these are no statistics of activations"))?;
        let about = serde_json::from_str(about).map_err(|_| wrong("statistics of another version"))?;
        let index = file.tensors().iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Ok(Moments { file, index, about })
    }

    /// The largest input of every module.
    pub fn amaxes(&self) -> Result<BTreeMap<String, f32>> {
        let named = |tensor: &TensorInfo| tensor.name.strip_suffix(Self::AMAX).map(str::to_string);
        let modules = self.file.tensors().iter().filter_map(named);
        modules.map(|module| self.numbers(&module, Self::AMAX, &[1]).map(|amax| (module, amax[0]))).collect()
    }

    /// The scales of keys and values of every attention, by the names of their tensors.
    pub fn cache_scales(&self) -> Result<BTreeMap<String, f32>> {
        let named = |tensor: &TensorInfo| {
            let of = |ending: &'static str| tensor.name.strip_suffix(ending).map(|module| (module.to_string(), ending));
            of(".k_scale").or_else(|| of(".v_scale"))
        };
        let found = self.file.tensors().iter().filter_map(named);
        found
            .map(|(module, ending)| Ok((format!("{module}{ending}"), self.numbers(&module, ending, &[1])?[0])))
            .collect()
    }

    /// Whether there is something of a module.
    pub fn has(&self, module: &str, ending: &str) -> bool {
        self.find(module, ending).is_some()
    }

    /// Whether there is something of any module.
    pub fn has_any(&self, ending: &str) -> bool {
        self.index.keys().any(|name| name.ends_with(ending))
    }

    /// The module whose matrices a module has.
    pub fn owner<'m>(&'m self, module: &'m str) -> &'m str {
        self.about.same_input.get(module).map_or(module, String::as_str)
    }

    fn find(&self, module: &str, ending: &str) -> Option<&TensorInfo> {
        let owner = match ending {
            Self::BLOCK_HESSIANS | Self::HESSIAN => self.owner(module),
            _ => module,
        };
        self.index.get(&format!("{owner}{ending}")).map(|&i| &self.file.tensors()[i])
    }

    /// Whether a module is an expert that no token reached.
    pub fn is_unseen(&self, module: &str) -> Result<bool> {
        let expert = module.split_once(".experts.").and_then(|(layer, rest)| {
            let number = rest.split('.').next()?.parse::<usize>().ok()?;
            Some((format!("{layer}.experts"), number))
        });
        let Some((layer, number)) = expert else { return Ok(false) };
        let Some(tensor) = self.find(&layer, Self::EXPERT_TOKENS) else { return Ok(false) };
        let counts = self.numbers(&layer, Self::EXPERT_TOKENS, &tensor.shape.clone())?;
        Ok(counts.get(number) == Some(&0.0))
    }

    /// The mean square of each of so many columns.
    pub fn mean_squares(&self, module: &str, cols: usize) -> Result<Vec<f32>> {
        let found = self.numbers(module, Self::MEAN_SQUARES, &[cols])?;
        self.positive(module, Self::MEAN_SQUARES, found.iter())?;
        Ok(found)
    }

    /// For each block of 16 columns 16 rows of 16, also where the file has the whole matrix alone.
    pub fn block_hessians(&self, module: &str, cols: usize) -> Result<Vec<f32>> {
        if self.has(module, Self::BLOCK_HESSIANS) {
            let found = self.numbers(module, Self::BLOCK_HESSIANS, &[cols / BLOCK, BLOCK, BLOCK])?;
            let diagonal = (0..cols).map(|i| &found[i * BLOCK + i % BLOCK]);
            self.positive(module, Self::BLOCK_HESSIANS, diagonal)?;
            return Ok(found);
        }
        let tensor = self.checked(module, Self::HESSIAN, &[cols, cols])?;
        let (mut found, mut bytes) = (Vec::with_capacity(cols * BLOCK), [0; 4 * BLOCK]);
        for row in 0..cols {
            let at = row * cols + row / BLOCK * BLOCK;
            self.file.read(tensor, 4 * at as u64, &mut bytes)?;
            self.extend(tensor, &bytes, &mut found)?;
        }
        self.positive(module, Self::HESSIAN, (0..cols).map(|i| &found[i * BLOCK + i % BLOCK]))?;
        Ok(found)
    }

    /// The whole matrix, row by row.
    pub fn hessian(&self, module: &str, cols: usize) -> Result<Vec<f32>> {
        let found = self.numbers(module, Self::HESSIAN, &[cols, cols])?;
        self.positive(module, Self::HESSIAN, (0..cols).map(|i| &found[i * cols + i]))?;
        Ok(found)
    }

    /// An error unless the file has something of a module in this shape.
    pub fn check(&self, module: &str, ending: &str, shape: &[usize]) -> Result<()> {
        self.checked(module, ending, shape).map(drop)
    }

    fn checked(&self, module: &str, ending: &str, shape: &[usize]) -> Result<&TensorInfo> {
        let tensor = self.find(module, ending).ok_or_else(|| {
            self.wrong(format!("it has no '{module}{ending}'; calibrate this very model, or skip the weight"))
        })?;
        if tensor.dtype != Dtype::F32 || tensor.shape != shape {
            let (name, dtype, got) = (&tensor.name, tensor.dtype, &tensor.shape);
            let reason = format!(
                "'{name}' is {dtype:?} {got:?}, and '{module}' needs F32 {shape:?}; these are statistics of another model"
            );
            return Err(self.wrong(reason));
        }
        Ok(tensor)
    }

    fn wrong(&self, reason: String) -> Error {
        Error::content(self.file.path(), reason)
    }

    /// Numbers of a tensor of this shape, read some at a time.
    fn numbers(&self, module: &str, ending: &str, shape: &[usize]) -> Result<Vec<f32>> {
        const PIECE: usize = 1 << 20;
        let tensor = self.checked(module, ending, shape)?;
        let len = tensor.len as usize;
        let (mut found, mut bytes) = (Vec::with_capacity(len / 4), vec![0; len.min(PIECE)]);
        for start in (0..len).step_by(PIECE) {
            let piece = &mut bytes[..(len - start).min(PIECE)];
            self.file.read(tensor, start as u64, piece)?;
            self.extend(tensor, piece, &mut found)?;
        }
        Ok(found)
    }

    fn extend(&self, tensor: &TensorInfo, bytes: &[u8], found: &mut Vec<f32>) -> Result<()> {
        let first = found.len();
        found.extend(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)));
        match found[first..].iter().find(|x| !x.is_finite()) {
            Some(x) => Err(self.wrong(format!("'{}' has the value {x}; calibrate again", tensor.name))),
            None => Ok(()),
        }
    }

    /// An error if a mean of squares is negative.
    fn positive<'x>(&self, module: &str, ending: &str, mut squares: impl Iterator<Item = &'x f32>) -> Result<()> {
        match squares.find(|x| **x < 0.0) {
            Some(x) => Err(self.wrong(format!("'{module}{ending}' has the mean square {x}; calibrate again"))),
            None => Ok(()),
        }
    }
}
