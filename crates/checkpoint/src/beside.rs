//! The files of a checkpoint beside its tensors.

use super::Checkpoint;
use super::action::Action;
use super::configuration;
use super::dialect::Model;
use super::folder::Kind;
use super::mixed::Mixed;
use super::plan::Plan;
use super::shards::{self, Shard};
use super::stamp::Stamp;
use super::target::{Extras, Target};
use crate::{Error, Result};
use serde_json::Value;
use std::fs::File;
use std::path::PathBuf;

/// The files beside the tensors.
pub(super) struct Beside {
    /// The tokenizer and other files that are copied, by their paths in the source.
    pub companions: Vec<PathBuf>,
    /// Configuration and index, which are written.
    pub written: Vec<(String, Vec<u8>)>,
    /// How many bytes they have.
    pub bytes: u64,
}

impl Beside {
    pub fn new(
        target: Target,
        model: &Model<'_>,
        plan: &Plan<'_>,
        extras: Extras,
        files: &[Shard<'_>],
    ) -> Result<Self> {
        let (checkpoint, mut bytes) = (model.checkpoint, 0);
        if target.kind() == Kind::File {
            return Ok(Beside { companions: Vec::new(), written: Vec::new(), bytes });
        }
        let companions = checkpoint.companions()?;
        for path in &companions {
            let path = checkpoint.root().join(path);
            let opened = File::open(&path).and_then(|file| file.metadata());
            bytes += opened.map_err(|source| Error::io(&path, source))?.len();
        }
        let ignored = configuration::ignored(plan, model, target);
        let mixed = Mixed::new(plan, target, checkpoint.config(), &ignored, extras);
        let mut config = target.config(checkpoint.config(), &ignored, extras);
        if let Some(mixed) = &mixed {
            config["quantization_config"] = mixed.config();
        }
        let decodes = plan.items.iter().any(|item| matches!(item.action, Action::Decode(_)));
        if let (Target::Plain(precision), true) = (target, decodes) {
            configuration::name_type(&mut config, precision);
        }
        let mut written = vec![("config.json".to_string(), pretty(&config)?)];
        let own = mixed.as_ref().map_or_else(|| target.quantization(&ignored, extras), Mixed::quantization);
        if let Some(quantization) = own {
            written.push(("hf_quant_config.json".to_string(), pretty(&quantization)?));
        }
        if let Some(name) = shards::index_name(files) {
            written.push((name, pretty(&shards::index(files))?));
        }
        bytes += written.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
        Ok(Beside { companions, written, bytes })
    }
}

/// The files of a source, as they are now.
pub(super) fn stamps(checkpoint: &Checkpoint, companions: &[PathBuf]) -> Result<Vec<(PathBuf, Stamp)>> {
    let weights = checkpoint.files().iter().map(|file| file.path().to_path_buf());
    let configuration = ["config.json", "hf_quant_config.json"].map(|name| checkpoint.root().join(name));
    let configuration = configuration.into_iter().filter(|path| path.exists());
    let companions = companions.iter().map(|path| checkpoint.root().join(path));
    weights.chain(configuration).chain(companions).map(|path| Stamp::of(&path).map(|stamp| (path, stamp))).collect()
}

fn pretty(value: &Value) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(value).map_err(|e| Error::Refused(e.to_string()))
}
