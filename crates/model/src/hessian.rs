//! Products of the columns of modules' inputs with each other, summed over a text, and kept on the
//! disk when a part of a layer is done: so the sums of one part are in memory.

use crate::{Error, Result};
use nvfp4_checkpoint::{Moments, fused};
use nvfp4_files::durable;
use nvfp4_kernels::gemm::baseline;
use nvfp4_spec::BLOCK;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};

/// Which products are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hessians {
    /// None.
    #[default]
    None,
    /// Of the 16 columns of each block: 16 numbers for each column.
    Local,
    /// Of all columns of inputs that have at most so many, and of each block for the others.
    Full(usize),
}

/// Tokens that are multiplied at a time: their sums are binary32, and binary64 beyond.
const TOKENS: usize = 1024;
/// Rows of products at a time.
const PANEL: usize = 256;

/// The sums of one input, above the diagonal.
struct Sums {
    cols: usize,
    tokens: u64,
    /// All columns, or the blocks one after the other.
    whole: bool,
    products: Vec<f64>,
}

impl Sums {
    fn new(cols: usize, whole: bool) -> Self {
        Sums { cols, tokens: 0, whole, products: vec![0.0; cols * if whole { cols } else { BLOCK }] }
    }

    fn take(&mut self, x: &[f32]) {
        self.tokens += (x.len() / self.cols) as u64;
        match self.whole {
            true => x.chunks(TOKENS * self.cols).for_each(|x| self.take_whole(x)),
            false => x.chunks_exact(self.cols).for_each(|x| self.take_blocks(x)),
        }
    }

    fn take_whole(&mut self, x: &[f32]) {
        let (n, tokens) = (self.cols, x.len() / self.cols);
        let mut turned = vec![0f32; x.len()];
        for (t, row) in x.chunks_exact(n).enumerate() {
            row.iter().enumerate().for_each(|(c, &x)| turned[c * tokens + t] = x);
        }
        let mut part = Vec::new();
        for first in (0..n).step_by(PANEL) {
            let (count, wide) = (PANEL.min(n - first), n - first);
            part.resize(count * wide, 0f32);
            let after = &turned[first * tokens..];
            baseline::f32(&after[..count * tokens], after, (count, wide, tokens), &mut part);
            for (i, part) in part.chunks_exact(wide).enumerate() {
                let row = &mut self.products[(first + i) * n + first..][..wide];
                row.iter_mut().zip(part).skip(i).for_each(|(sum, &x)| *sum += f64::from(x));
            }
        }
    }

    fn take_blocks(&mut self, x: &[f32]) {
        for (sums, x) in self.products.chunks_exact_mut(BLOCK * BLOCK).zip(x.chunks_exact(BLOCK)) {
            let x: [f64; BLOCK] = std::array::from_fn(|i| f64::from(x[i]));
            for (row, a) in sums.chunks_exact_mut(BLOCK).zip(x) {
                row.iter_mut().zip(x).for_each(|(sum, b)| *sum += a * b);
            }
        }
    }

    /// The means, in the shape that they are written in.
    fn write(&self, file: &mut File) -> std::io::Result<Vec<usize>> {
        let (n, tokens) = (self.cols, self.tokens.max(1) as f64);
        let row = |i: usize| -> Vec<u8> {
            let wide = if self.whole { n } else { BLOCK };
            let at = |j: usize| match self.whole {
                true => self.products[i.min(j) * n + i.max(j)],
                false => self.products[i * BLOCK + j],
            };
            (0..wide).flat_map(|j| ((at(j) / tokens) as f32).to_le_bytes()).collect()
        };
        (0..n).try_for_each(|i| file.write_all(&row(i)))?;
        Ok(if self.whole { vec![n, n] } else { vec![n / BLOCK, BLOCK, BLOCK] })
    }
}

/// Collects the products of inputs, one part of a layer after the other.
pub(crate) struct Collected {
    kept: Hessians,
    path: PathBuf,
    file: Option<File>,
    /// What the modules that are summed up now belong to.
    part: String,
    sums: BTreeMap<String, Sums>,
    /// Modules whose input is that of another.
    pub same: BTreeMap<String, String>,
    /// What is on the disk, in order.
    tensors: Vec<(String, Vec<usize>)>,
    error: Option<Error>,
}

impl Collected {
    /// Keeps what it collects beside the file that it will be a part of.
    pub fn new(kept: Hessians, output: &Path) -> Self {
        let path = durable::beside(output, &format!(".{}.hessians", std::process::id()));
        let (sums, same) = (BTreeMap::new(), BTreeMap::new());
        Collected { kept, path, file: None, part: String::new(), sums, same, tensors: Vec::new(), error: None }
    }

    pub fn take(&mut self, module: &str, x: &[f32], cols: usize) {
        if self.kept == Hessians::None || !cols.is_multiple_of(BLOCK) || self.error.is_some() {
            return;
        }
        let part = module.rsplit_once('.').map_or("", |(part, _)| part);
        if part != self.part {
            self.end_part();
            self.part = part.to_string();
        }
        // What a server joins into one matrix has one input.
        let kind = |other: &str| fused(other).map(|(_, kind)| kind);
        let own =
            self.sums.keys().find(|&other| other != module && kind(other).is_some() && kind(other) == kind(module));
        if let Some(owner) = own {
            self.same.insert(module.to_string(), owner.clone());
            return;
        }
        let whole = matches!(self.kept, Hessians::Full(most) if cols <= most);
        self.sums.entry(module.to_string()).or_insert_with(|| Sums::new(cols, whole)).take(x);
    }

    /// Writes the sums of a part of a layer.
    fn end_part(&mut self) {
        for (module, sums) in std::mem::take(&mut self.sums) {
            let ending = if sums.whole { Moments::HESSIAN } else { Moments::BLOCK_HESSIANS };
            let made = || File::options().read(true).write(true).create_new(true).open(&self.path);
            let file = match self.file.take() {
                Some(file) => Ok(file),
                None => made(),
            };
            let written = file.and_then(|mut file| {
                let shape = sums.write(&mut file)?;
                self.file = Some(file);
                Ok(shape)
            });
            match written {
                Ok(shape) => self.tensors.push((format!("{module}{ending}"), shape)),
                Err(error) => self.error = Some(nvfp4_files::Error::io(&self.path, error).into()),
            }
        }
    }

    /// Ends the last part.
    pub fn finish(&mut self) -> Result<()> {
        self.end_part();
        self.error.take().map_or(Ok(()), Err)
    }

    /// Writes a file of vectors and of all that was collected, with a text about them.
    pub fn save(&self, path: &Path, vectors: &[(String, Vec<f32>)], key: &str, about: &str) -> Result<()> {
        let mut header = serde_json::Map::new();
        header.insert("__metadata__".to_string(), serde_json::json!({ key: about }));
        let small = vectors.iter().map(|(name, values)| (name, vec![values.len()]));
        let mut at = 0;
        for (name, shape) in small.chain(self.tensors.iter().map(|(name, shape)| (name, shape.clone()))) {
            let end = at + 4 * shape.iter().product::<usize>();
            let tensor = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [at, end] });
            header.insert(name.clone(), tensor);
            at = end;
        }
        let mut header = serde_json::Value::Object(header).to_string();
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        durable::write_with(path, |part| {
            let write = || -> std::io::Result<()> {
                let mut file = File::create(part)?;
                file.write_all(&(header.len() as u64).to_le_bytes())?;
                file.write_all(header.as_bytes())?;
                for (_, values) in vectors {
                    file.write_all(&nvfp4_files::container::bytes(values))?;
                }
                if let Some(mut kept) = self.file.as_ref() {
                    kept.rewind()?;
                    std::io::copy(&mut kept, &mut file)?;
                }
                Ok(())
            };
            write().map_err(|error| nvfp4_files::Error::io(path, error).into())
        })
    }
}

impl Drop for Collected {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            let _ = fs::remove_file(&self.path); // what is left over is named after its owner
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_products_of_columns() {
        let (cols, tokens) = (320, 1500);
        let x: Vec<f32> = (0..cols * tokens).map(|i| ((i * 7919) % 1013) as f32 / 506.0 - 1.0).collect();
        let (mut whole, mut blocks) = (Sums::new(cols, true), Sums::new(cols, false));
        for part in x.chunks(700 * cols) {
            whole.take(part);
            blocks.take(part);
        }
        for (i, j) in [(0, 0), (0, 319), (17, 18), (255, 256), (300, 310), (310, 311)] {
            let exact: f64 = x.chunks_exact(cols).map(|x| f64::from(x[i]) * f64::from(x[j])).sum();
            assert!((whole.products[i * cols + j] - exact).abs() < 1e-3, "{i} {j}");
            if i / BLOCK == j / BLOCK {
                assert_eq!(blocks.products[i * BLOCK + j % BLOCK], exact, "{i} {j}");
            }
        }
        assert_eq!((whole.tokens, blocks.tokens), (1500, 1500));
    }
}
