//! What exists where a checkpoint will be written, and whether it may be replaced.

use super::existing::Existing;
use super::file::TensorFile;
use super::folder::{INDEX_SUFFIX, Kind};
use super::gguf;
use super::journal::{JOURNAL, LOCK};
use super::settings::Settings;
use crate::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Names of files that belong to a checkpoint, wherever it comes from. Other files belong to it if
/// its source has them too.
const FILES: [&str; 15] = [
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    JOURNAL,
    LOCK,
];

/// What exists where a checkpoint will be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum There {
    /// Nothing, or an empty folder.
    Nothing,
    /// A checkpoint that may be replaced.
    Replaceable,
    /// A finished checkpoint, where an unfinished one was to be continued.
    Finished,
}

/// An error if a target exists and may not, before anything else is checked.
pub fn check_free(target: &Path, settings: &Settings) -> Result<()> {
    match settings.existing {
        Existing::Refuse => check_target(target, settings.target.kind(), Existing::Refuse, &[]).map(drop),
        Existing::Resume | Existing::Replace => Ok(()),
    }
}

/// A target that exists is replaced only on request, and only if all of it is what a conversion
/// writes or copies.
pub(super) fn check_target(target: &Path, kind: Kind, existing: Existing, companions: &[PathBuf]) -> Result<There> {
    let Ok(metadata) = target.symlink_metadata() else { return Ok(There::Nothing) };
    let empty = kind == Kind::Folder && metadata.is_dir() && entries(target)?.is_empty();
    match (existing, empty) {
        (_, true) => return Ok(There::Nothing),
        (Existing::Refuse, false) => return Err(exists(target)),
        (Existing::Resume, false) => return Ok(There::Finished),
        (Existing::Replace, false) => {}
    }
    let refused = |what: &str| {
        let text =
            format!("{} {what}; only checkpoints are replaced: move it, or choose another target", target.display());
        Err(Error::Refused(text))
    };
    match kind {
        _ if metadata.is_symlink() => refused("is a symbolic link"),
        Kind::File if target.is_file() && is_model(target) => Ok(There::Replaceable),
        Kind::File => refused("is neither a GGUF file nor a safetensors file"),
        Kind::Folder if !metadata.is_dir() => refused("is a file"),
        Kind::Folder => match foreign(target, companions)? {
            Some(name) => refused(&format!("holds '{}', which is not part of a checkpoint", name.display())),
            None => {
                let names = entries(target)?;
                match names.iter().any(|name| is_weights(name)) && names.iter().any(|name| name == "config.json") {
                    true => Ok(There::Replaceable),
                    false => refused("is a folder without config.json and the weights of a model"),
                }
            }
        },
    }
}

/// Whether a file is what a conversion to one file writes.
fn is_model(file: &Path) -> bool {
    gguf::is_gguf(file) || TensorFile::open(file).is_ok()
}

pub(super) fn exists(target: &Path) -> Error {
    Error::TargetExists { path: target.to_path_buf() }
}

/// The first thing in a folder that no conversion writes or copies, by its path in the folder.
fn foreign(folder: &Path, companions: &[PathBuf]) -> Result<Option<PathBuf>> {
    let mut open = vec![PathBuf::new()];
    while let Some(inner) = open.pop() {
        for name in entries(&folder.join(&inner))? {
            let path = inner.join(&name);
            let full = folder.join(&path);
            let top = inner.as_os_str().is_empty();
            if full.is_dir() && !full.is_symlink() {
                match companions.iter().any(|companion| companion.starts_with(&path)) {
                    true => open.push(path),
                    false => return Ok(Some(path)),
                }
                continue;
            }
            let known = top && (FILES.contains(&name.as_str()) || is_weights(&name));
            if !known && !companions.contains(&path) {
                return Ok(Some(path));
            }
        }
    }
    Ok(None)
}

/// Whether a file has a name that the weights of one model have: a folder may hold many models, a
/// file each.
fn is_weights(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".safetensors") else { return name.ends_with(INDEX_SUFFIX) };
    let number = |text: &str| text.len() >= 5 && text.bytes().all(|b| b.is_ascii_digit());
    let parts = stem.rsplit_once("-of-").and_then(|(start, count)| Some((start.rsplit_once('-')?.1, count)));
    stem == "model" || parts.is_some_and(|(this, count)| number(this) && number(count))
}

/// The names in a folder, sorted.
pub(super) fn entries(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let io = |source| Error::io(folder, source);
    for entry in fs::read_dir(folder).map_err(io)? {
        names.push(entry.map_err(io)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}
