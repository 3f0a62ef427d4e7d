//! The states of an evaluation on disk, to continue it.

use crate::drift::Drift;
use crate::saturation::Blocks;
use crate::{Result, refused};
use nvfp4_checkpoint::TensorFile;
use nvfp4_files::{container, durable};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How often states are written, at the end of a layer.
const EVERY: Duration = Duration::from_secs(60);

/// Where an evaluation is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kept {
    /// Layers that are done.
    pub layer: usize,
    /// The states of each way to run.
    pub states: Vec<Vec<f32>>,
    /// What was found so far.
    pub drift: Vec<Drift>,
    /// What was found so far.
    pub blocks: BTreeMap<String, Blocks>,
}

/// What is written beside the states.
#[derive(Serialize, Deserialize)]
struct About {
    request: String,
    layer: usize,
    lanes: usize,
    drift: Vec<Drift>,
    blocks: BTreeMap<String, Blocks>,
}

/// A file for the states of one request.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    request: String,
    written: Mutex<Instant>,
}

impl StateFile {
    /// The file for what `request` says: the models, the text and the settings.
    pub fn new(path: &Path, request: String) -> Self {
        StateFile { path: path.to_path_buf(), request, written: Mutex::new(Instant::now()) }
    }

    /// Whether it is time to write.
    pub(crate) fn is_due(&self) -> bool {
        self.written.lock().expect("no holder panics").elapsed() >= EVERY
    }

    /// What is there of this request. Another request's is an error, and so is what does not fit.
    pub(crate) fn read(&self, fits: impl Fn(&Kept) -> bool) -> Result<Option<Kept>> {
        if !self.path.exists() {
            return Ok(None);
        }
        let wrong =
            |reason: &str| refused(format!("{}: {reason}; remove it, or name another file", self.path.display()));
        let file = TensorFile::open(&self.path).map_err(|error| wrong(&format!("it is damaged ({error})")))?;
        let about = file.metadata().get("nvfp4-eval").ok_or_else(|| wrong("this is not the state of an evaluation"))?;
        let about: About = serde_json::from_str(about).map_err(|_| wrong("the state of another version"))?;
        if about.request != self.request {
            return Err(wrong("the state of an evaluation of other models, of another text or with other settings"));
        }
        let state = |lane: usize| -> Result<Vec<f32>> {
            let name = lane.to_string();
            let tensor = file.tensors().iter().find(|tensor| tensor.name == name && tensor.dtype == Dtype::F32);
            let tensor = tensor.ok_or_else(|| wrong("it lacks a state"))?;
            let mut bytes = vec![0; tensor.len as usize];
            file.read(tensor, 0, &mut bytes)?;
            Ok(bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
        };
        let states = (0..about.lanes).map(state).collect::<Result<_>>()?;
        let kept = Kept { layer: about.layer, states, drift: about.drift, blocks: about.blocks };
        if fits(&kept) { Ok(Some(kept)) } else { Err(wrong("it is damaged")) }
    }

    pub(crate) fn write(&self, kept: &Kept) -> Result<()> {
        let Kept { layer, states, drift, blocks } = kept;
        let about = About {
            request: self.request.clone(),
            layer: *layer,
            lanes: states.len(),
            drift: drift.clone(),
            blocks: blocks.clone(),
        };
        let about = serde_json::to_string(&about).map_err(|error| refused(error.to_string()))?;
        let vector = |(lane, state): (usize, &Vec<f32>)| (lane.to_string(), state.len(), container::bytes(state));
        save(&self.path, states.iter().enumerate().map(vector), "nvfp4-eval", about)?;
        *self.written.lock().expect("no holder panics") = Instant::now();
        Ok(())
    }

    pub(crate) fn remove(&self) -> Result<()> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(nvfp4_files::Error::io(&self.path, error).into())
            }
            _ => Ok(()),
        }
    }
}

/// Writes vectors of binary32 numbers, each with its name and length, and a text about them.
pub(crate) fn save(
    path: &Path,
    vectors: impl Iterator<Item = (String, usize, Vec<u8>)>,
    key: &str,
    about: String,
) -> Result<()> {
    let vectors: Vec<(String, usize, Vec<u8>)> = vectors.collect();
    let wrong = |error: safetensors::SafeTensorError| refused(format!("{}: {error}", path.display()));
    let views = vectors.iter().map(|(name, len, bytes)| Ok((name, TensorView::new(Dtype::F32, vec![*len], bytes)?)));
    let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>().map_err(wrong)?;
    let metadata = HashMap::from([(key.to_string(), about)]);
    durable::write_with(path, |part| safetensors::serialize_to_file(views, Some(metadata), part).map_err(wrong))
}
