//! A checkpoint: one safetensors file, or a folder of them with its index and JSON files.

use super::file::{TensorFile, TensorInfo};
use crate::{Error, Result};
use nvfp4_files::regular;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Component, Path, PathBuf};

/// The largest JSON file that is read: an index of a million tensors takes about 100 MB.
const MAX_JSON: u64 = 256 << 20;

/// What the index of a sharded checkpoint is called, after the name of the model.
pub(super) const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// Weights in other formats, which are not copied to a converted checkpoint.
const OTHER_WEIGHTS: [&str; 11] =
    ["safetensors", "bin", "pt", "pth", "ckpt", "distcp", "gguf", "onnx", "h5", "msgpack", "part"];

/// A tensor of a checkpoint and the file that holds it.
#[derive(Clone, Copy, Debug)]
pub struct Located<'a> {
    /// The file.
    pub file: &'a TensorFile,
    /// The tensor.
    pub info: &'a TensorInfo,
}

impl Located<'_> {
    /// Reads bytes of the tensor from `offset` on.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.file.read(self.info, offset, bytes)
    }

    /// All bytes of a small tensor.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.info.len as usize];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// An error about this tensor.
    pub(super) fn wrong(&self, reason: impl std::fmt::Display) -> Error {
        let reason = format!("tensor '{}': {reason}", self.info.name);
        Error::content(self.file.path(), reason)
    }
}

/// An open checkpoint. Headers are read and checked; tensors stay on disk.
#[derive(Debug)]
pub struct Checkpoint {
    root: PathBuf,
    kind: Kind,
    files: Vec<TensorFile>,
    tensors: BTreeMap<String, (usize, usize)>,
    config: Option<Value>,
    quantization: Option<Value>,
}

/// What a checkpoint is on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One file.
    File,
    /// A folder.
    Folder,
}

impl Checkpoint {
    /// Opens a folder or a file.
    ///
    /// In a folder the index says which files belong to the checkpoint; without one,
    /// `model.safetensors`, or else every safetensors file. Every tensor must be in exactly one
    /// file, and in the one that the index names.
    pub fn open(path: &Path) -> Result<Self> {
        let metadata = fs::metadata(path).map_err(|source| {
            let missing =
                "No such file or folder; a model is read from this machine, so download it and give its folder";
            let source = match source.kind() {
                ErrorKind::NotFound => io::Error::new(ErrorKind::NotFound, missing),
                _ => source,
            };
            Error::io(path, source)
        })?;
        match metadata.is_dir() {
            true => Self::open_folder(path),
            false => Self::collect(path, Kind::File, vec![TensorFile::open(path)?], None, None),
        }
    }

    /// A checkpoint of files that are open already, or in memory, without a folder around them.
    /// Errors call it `name`.
    pub fn from_files(
        name: &Path,
        files: Vec<TensorFile>,
        config: Option<Value>,
        quantization: Option<Value>,
    ) -> Result<Self> {
        Self::collect(name, Kind::File, files, config, quantization)
    }

    fn open_folder(root: &Path) -> Result<Self> {
        let names = list(root)?;
        let ending = |end: &str| names.iter().filter(|n| n.ends_with(end)).cloned().collect::<Vec<_>>();
        let index_files = ending(INDEX_SUFFIX);
        let index = match &index_files[..] {
            [] => None,
            [one] => Some(Index::read(&inside(root, one)?)?),
            several => {
                let reason =
                    format!("several indices: {}; keep the one that belongs to the checkpoint", several.join(", "));
                return Err(Error::content(root, reason));
            }
        };
        let files = match &index {
            Some(index) => index.files(),
            None if names.iter().any(|n| n == "model.safetensors") => vec!["model.safetensors".to_string()],
            None => ending(".safetensors"),
        };
        if files.is_empty() {
            let hint = match ending(".gguf").first() {
                Some(gguf) => format!(
                    "no safetensors files; '{gguf}' is GGUF: `inspect` and `verify` read it as a \
                     file, and it cannot be converted"
                ),
                None => match parts(root, &names) {
                    parts if parts.is_empty() => "no safetensors files in this folder".to_string(),
                    // A pipeline of diffusers, for one: several models, each in a folder of its
                    // own.
                    parts => format!(
                        "no safetensors files in this folder, but there are some in {}; give one of these",
                        parts.join(", ")
                    ),
                },
            };
            return Err(Error::content(root, hint));
        }
        let open = |name: &String| match (&index, root.join(name).symlink_metadata()) {
            (Some(index), Err(_)) => {
                Err(index.wrong(format!("it names the file '{name}', which is missing; download it again")))
            }
            _ => TensorFile::open(&inside(root, name)?),
        };
        let files = files.iter().map(open).collect::<Result<Vec<_>>>()?;
        let json = |name: &str| names.iter().any(|n| n == name).then(|| read_json(&inside(root, name)?)).transpose();
        let checkpoint = Self::collect(root, Kind::Folder, files, json("config.json")?, json("hf_quant_config.json")?)?;
        if let Some(index) = index {
            checkpoint.check_index(&index)?;
        }
        Ok(checkpoint)
    }

    fn collect(
        root: &Path,
        kind: Kind,
        files: Vec<TensorFile>,
        config: Option<Value>,
        quantization: Option<Value>,
    ) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (f, file) in files.iter().enumerate() {
            for (t, tensor) in file.tensors().iter().enumerate() {
                if let Some((other, _)) = tensors.insert(tensor.name.clone(), (f, t)) {
                    let other: &TensorFile = &files[other];
                    let reason = format!("tensor '{}' is also in {}", tensor.name, other.path().display());
                    return Err(Error::content(file.path(), reason));
                }
            }
        }
        Ok(Checkpoint { root: root.to_path_buf(), kind, files, tensors, config, quantization })
    }

    /// The same checkpoint with parts of some tensors in their place.
    pub(super) fn replace(mut self, mut parts: BTreeMap<String, Vec<TensorInfo>>) -> Result<Self> {
        self.files.iter_mut().for_each(|file| file.replace(&mut parts));
        Self::collect(&self.root, self.kind, self.files, self.config, self.quantization)
    }

    fn check_index(&self, index: &Index) -> Result<()> {
        for (name, file) in &index.map {
            match self.get(name) {
                Some(found) if found.file.path().file_name().is_some_and(|n| n == file.as_str()) => {}
                _ => return Err(index.wrong(format!("tensor '{name}' is not in '{file}', where the index has it"))),
            }
        }
        match self.tensors.keys().find(|name| !index.map.contains_key(*name)) {
            Some(name) => Err(index.wrong(format!("tensor '{name}' is in the files but not in the index"))),
            None => Ok(()),
        }
    }

    /// The folder or file.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether it is a folder.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its safetensors files.
    pub fn files(&self) -> &[TensorFile] {
        &self.files
    }

    /// `config.json`.
    pub fn config(&self) -> Option<&Value> {
        self.config.as_ref()
    }

    /// `hf_quant_config.json`.
    pub fn quantization(&self) -> Option<&Value> {
        self.quantization.as_ref()
    }

    /// A tensor by its name.
    pub fn get(&self, name: &str) -> Option<Located<'_>> {
        let &(f, t) = self.tensors.get(name)?;
        let file = &self.files[f];
        Some(Located { file, info: &file.tensors()[t] })
    }

    /// All tensors, file by file and by name within a file.
    pub fn tensors(&self) -> impl Iterator<Item = Located<'_>> {
        let mut order: Vec<_> = self.tensors.iter().map(|(name, &(f, t))| (f, name, t)).collect();
        order.sort();
        order.into_iter().map(|(f, _, t)| Located { file: &self.files[f], info: &self.files[f].tensors()[t] })
    }

    /// Bytes of all tensors.
    pub fn byte_len(&self) -> u64 {
        self.files.iter().flat_map(|f| f.tensors()).map(|t| t.len).sum()
    }

    /// The path of a file beside the weights, if it is there.
    pub(super) fn companion(&self, name: &str) -> Result<Option<PathBuf>> {
        let present = self.kind == Kind::Folder && self.root.join(name).symlink_metadata().is_ok();
        present.then(|| inside(&self.root, name)).transpose()
    }

    /// Files that are copied to a converted checkpoint (tokenizer, generation settings, code),
    /// relative to the folder: everything but weights, the index, the two configurations, and
    /// hidden folders.
    pub fn companions(&self) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        if self.kind == Kind::Folder {
            walk(&self.root, "", &mut found)?;
        }
        found.sort();
        Ok(found)
    }
}

/// The files under a folder that are copied. `folder` is relative to the root, with slashes on
/// every system.
///
/// Links to folders are not followed: a link to a folder that contains it would have no end.
fn walk(root: &Path, folder: &str, found: &mut Vec<PathBuf>) -> Result<()> {
    for name in list(&root.join(folder))? {
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        let there = root.join(&path);
        if name.starts_with('.') || (there.is_symlink() && there.is_dir()) {
            continue;
        }
        let full = inside(root, &path)?;
        if full.is_dir() {
            walk(root, &path, found)?;
            continue;
        }
        let extension = Path::new(&name).extension();
        let weights = extension.is_some_and(|e| OTHER_WEIGHTS.iter().any(|w| e.eq_ignore_ascii_case(w)));
        let ours = folder.is_empty() && ["config.json", "hf_quant_config.json"].contains(&name.as_str());
        if !weights && !ours && !name.ends_with(INDEX_SUFFIX) {
            // What is not a file is an error that names it: otherwise the target would silently
            // lack it.
            regular::open(&full)?;
            found.push(PathBuf::from(path));
        }
    }
    Ok(())
}

/// The folders in a folder that have safetensors files.
fn parts(root: &Path, names: &[String]) -> Vec<String> {
    let has = |name: &&String| {
        let inner = root.join(name);
        inner.is_dir() && list(&inner).is_ok_and(|names| names.iter().any(|n| n.ends_with(".safetensors")))
    };
    names.iter().filter(has).map(|name| format!("'{name}'")).collect()
}

/// The names in a folder, sorted. Names that are not Unicode are left out.
fn list(folder: &Path) -> Result<Vec<String>> {
    let io = |source| Error::io(folder, source);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        names.extend(entry.map_err(io)?.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

/// The path of a file of a folder, after checking that it stays there.
///
/// A symbolic link may lead elsewhere in the folder, or from a snapshot of the Hugging Face cache
/// to that repository's `blobs`, and nowhere else: what it leads to would be read, and copied, as
/// part of the model.
fn inside(root: &Path, name: &str) -> Result<PathBuf> {
    let escapes = |reason: &str| Error::content(root, format!("'{name}' {reason}"));
    let plain = Path::new(name).components().all(|c| matches!(c, Component::Normal(_)));
    if !plain || name.is_empty() || name.contains('\\') || name.contains('\0') {
        return Err(escapes("leads out of the folder; a checkpoint may only name files inside it"));
    }
    let path = root.join(name);
    let io = |path: &Path, source| Error::io(path, source);
    let (real, real_root) =
        (path.canonicalize().map_err(|e| io(&path, e))?, root.canonicalize().map_err(|e| io(root, e))?);
    let cache = real_root
        .parent()
        .filter(|snapshots| snapshots.ends_with("snapshots"))
        .and_then(Path::parent)
        .map(|repository| repository.join("blobs"));
    let allowed = real.starts_with(&real_root) || cache.is_some_and(|blobs| real.starts_with(blobs));
    if allowed {
        Ok(path)
    } else {
        Err(escapes("is a symbolic link that leads out of the folder; copy the file instead"))
    }
}

/// Reads a JSON file in which no object has a key twice.
pub(super) fn read_json(path: &Path) -> Result<Value> {
    Ok(regular::read_json(path, MAX_JSON)?)
}

/// The index of a sharded checkpoint.
struct Index {
    path: PathBuf,
    map: BTreeMap<String, String>,
}

impl Index {
    fn read(path: &Path) -> Result<Self> {
        Self::new(path, &read_json(path)?)
    }

    fn new(path: &Path, json: &Value) -> Result<Self> {
        let invalid = |reason: &str| Error::content(path, reason.to_string());
        let map = json.get("weight_map").and_then(Value::as_object);
        let map = map.ok_or_else(|| invalid("expected an object 'weight_map' of tensor and file names"))?;
        let mut index = Index { path: path.to_path_buf(), map: BTreeMap::new() };
        for (name, file) in map {
            let file =
                file.as_str().ok_or_else(|| invalid(&format!("tensor '{name}': expected the name of a file")))?;
            // Anything but a plain name is refused before the disk is read.
            let mut components = Path::new(file).components();
            if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
                || file.contains('\\')
            {
                let reason =
                    format!("tensor '{name}': '{file}' leads out of the folder; an index names files beside it");
                return Err(invalid(&reason));
            }
            index.map.insert(name.clone(), file.to_string());
        }
        Ok(index)
    }

    fn files(&self) -> Vec<String> {
        let files: std::collections::BTreeSet<_> = self.map.values().cloned().collect();
        files.into_iter().collect()
    }

    fn wrong(&self, reason: String) -> Error {
        Error::content(&self.path, reason)
    }
}

/// Checks the text of an index, for fuzzing: whatever the bytes, this returns.
#[doc(hidden)]
pub fn check_index(bytes: &[u8]) -> bool {
    regular::parse_json(bytes).is_ok_and(|json| Index::new(Path::new("index"), &json).is_ok())
}
