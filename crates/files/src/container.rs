//! Files of our own: safetensors with a format, a version and a JSON index in the metadata. Nothing in a file is taken on trust.

use crate::json::unique_keys;
use crate::{Error, Result, durable};
pub use safetensors::tensor::TensorView;
pub use safetensors::{Dtype, SafeTensors};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::path::Path;

/// A kind of file.
pub struct Container {
    /// The value of `format` in the metadata.
    pub format: &'static str,
    /// The values of `version` that can be read.
    pub versions: &'static [&'static str],
    /// The key of the index.
    pub index: &'static str,
}

/// A tensor of a file.
pub struct Part {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements, little-endian.
    pub bytes: Vec<u8>,
}

/// What is wrong with a file, without its path.
pub type Checked<T> = std::result::Result<T, String>;

impl Container {
    /// Writes a file of a version, which is replaced if it exists.
    pub fn write(&self, path: &Path, version: &str, parts: &[Part], index: &impl Serialize) -> Result<()> {
        let invalid = |source| Error::Safetensors { path: path.to_path_buf(), source };
        let (views, metadata) = self.views(path, version, parts, index)?;
        durable::write_with(path, |part| safetensors::serialize_to_file(views, Some(metadata), part).map_err(invalid))
    }

    /// The bytes of a file of a version. `path` is what errors call it.
    pub fn encode(&self, path: &Path, version: &str, parts: &[Part], index: &impl Serialize) -> Result<Vec<u8>> {
        let (views, metadata) = self.views(path, version, parts, index)?;
        safetensors::serialize(views, Some(metadata))
            .map_err(|source| Error::Safetensors { path: path.to_path_buf(), source })
    }

    /// Tensors and metadata of a file.
    #[expect(clippy::type_complexity, reason = "what the safetensors library takes")]
    fn views<'p>(
        &self,
        path: &Path,
        version: &str,
        parts: &'p [Part],
        index: &impl Serialize,
    ) -> Result<(Vec<(&'p str, TensorView<'p>)>, HashMap<String, String>)> {
        let invalid = |source| Error::Safetensors { path: path.to_path_buf(), source };
        let views = parts
            .iter()
            .map(|p| Ok((p.name.as_str(), TensorView::new(p.dtype, p.shape.clone(), &p.bytes).map_err(invalid)?)))
            .collect::<Result<Vec<_>>>()?;
        let json = serde_json::to_string(index);
        let json = json.map_err(|e| Error::content(path, e.to_string()))?;
        let metadata = [("format", self.format.to_string()), ("version", version.to_string()), (self.index, json)];
        let metadata: HashMap<String, String> = metadata.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
        Ok((views, metadata))
    }

    /// Reads a file of this kind; `content` gets its tensors, its version and its index.
    pub fn read<I: DeserializeOwned, T>(
        &self,
        path: &Path,
        content: impl FnOnce(&SafeTensors<'_>, &str, I) -> Checked<T>,
    ) -> Result<T> {
        let bytes = crate::regular::read(path, u64::MAX)?;
        self.decode(path, &bytes, content)
    }

    /// Reads the bytes of a file of this kind. `path` is what errors call it.
    pub fn decode<I: DeserializeOwned, T>(
        &self,
        path: &Path,
        bytes: &[u8],
        content: impl FnOnce(&SafeTensors<'_>, &str, I) -> Checked<T>,
    ) -> Result<T> {
        let invalid = |source| Error::Safetensors { path: path.to_path_buf(), source };
        let (header_len, header) = SafeTensors::read_metadata(bytes).map_err(invalid)?;
        let file = SafeTensors::deserialize(bytes).map_err(invalid)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        // The header follows its own length, in 8 bytes.
        unique_keys(&bytes[8..][..header_len])
            .map_err(|e| format!("header: {e}"))
            .and_then(|()| self.read_index(&metadata))
            .and_then(|(version, index)| content(&file, version, index))
            .map_err(|reason| Error::content(path, reason))
    }

    fn read_index<I: DeserializeOwned>(&self, metadata: &HashMap<String, String>) -> Checked<(&'static str, I)> {
        let Container { format, versions, index } = self;
        let value = |key: &str| metadata.get(key).map_or("none", String::as_str);
        if value("format") != *format {
            return Err(format!("expected the format '{format}', got '{}'", value("format")));
        }
        let Some(version) = versions.iter().find(|version| **version == value("version")) else {
            return Err(format!("expected format version {}, got {}", versions.join(" or "), value("version")));
        };
        let json = metadata.get(*index).map_or("", String::as_str);
        let read: serde_json::Result<I> = unique_keys(json.as_bytes()).and_then(|()| serde_json::from_str(json));
        read.map(|read| (*version, read)).map_err(|e| format!("metadata '{index}': {e}"))
    }
}

/// A tensor of the file, which must have one of these types and one of these shapes.
pub fn stored<'a>(
    file: &SafeTensors<'a>,
    name: &str,
    dtypes: &[Dtype],
    shapes: &[&[usize]],
) -> Checked<TensorView<'a>> {
    let view = file.tensor(name).map_err(|_| format!("tensor '{name}' is missing"))?;
    if !dtypes.contains(&view.dtype()) {
        let expected: Vec<String> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
        return Err(format!("tensor '{name}': expected {}, got {:?}", expected.join(" or "), view.dtype()));
    }
    if !shapes.contains(&view.shape()) {
        let expected: Vec<String> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
        return Err(format!("tensor '{name}': expected the shape {}, got {:?}", expected.join(" or "), view.shape()));
    }
    Ok(view)
}

/// The numbers of an F32 tensor.
pub fn floats(view: &TensorView<'_>) -> Vec<f32> {
    view.data().as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

/// Numbers as the bytes of an F32 tensor.
pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}
