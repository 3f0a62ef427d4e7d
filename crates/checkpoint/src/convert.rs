//! A checkpoint becomes an NVFP4 checkpoint, without ever being in memory as a whole: the two passes
//! over its source (`passes`), and everything around them.

use super::Checkpoint;
use super::action::Action;
use super::architecture::loading;
use super::client::Client;
use super::conversion::{Conversion, Task, laid_out};
use super::dialect::Model;
use super::existing::Existing;
use super::finding::{Finding, Severity};
use super::gguf;
use super::plan::Item;
use super::settings::{Observer, Pass, Settings, Summary};
use super::shards::{self, Shard};
use super::share::{needed, source_len};
use super::target::Target;
use super::verify::verify;
use super::work::{Order, Work};
use crate::{Error, Result};
use nvfp4_files::durable::Disk;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Converts a checkpoint. `stop` may be set from elsewhere: the conversion ends with
/// [`Error::Interrupted`] and can be continued.
///
/// Whatever is wrong with the source, the settings or the disk is an error before anything is
/// written. The result is read back before it gets its name. The summary has what [`verify`] finds
/// in it.
///
/// ```
/// use nvfp4_checkpoint::{Outcome, Settings, convert};
/// use std::sync::atomic::AtomicBool;
///
/// # use safetensors::{Dtype, tensor::TensorView};
/// # let folder = std::env::temp_dir().join(format!("nvfp4-convert-{}", std::process::id()));
/// # let (source, target) = (folder.join("model"), folder.join("model-NVFP4"));
/// # std::fs::create_dir_all(&source).unwrap();
/// # let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}"#;
/// # std::fs::write(source.join("config.json"), config).unwrap();
/// # let bytes = [0x80, 0x3F].repeat(32 * 64); // 1.0 in BF16
/// # let weight = TensorView::new(Dtype::BF16, vec![32, 64], &bytes).unwrap();
/// # let file = source.join("model.safetensors");
/// # safetensors::serialize_to_file([("model.layers.0.mlp.down_proj.weight", weight)], None, &file).unwrap();
/// // `source` is a folder with one BF16 weight of 32 × 64, `target` is not there yet.
/// let stop = AtomicBool::new(false);
/// let summary = convert(&source, &target, &Settings::default(), &(), &stop)?;
/// assert_eq!((summary.outcome, summary.quantized.len()), (Outcome::Written, 1));
/// assert_eq!(summary.quantized[0].measure.largest, 0.0); // all ones: nothing is lost
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), nvfp4_checkpoint::Error>(())
/// ```
pub fn convert(
    source: &Path,
    target: &Path,
    settings: &Settings,
    observer: &dyn Observer,
    stop: &AtomicBool,
) -> Result<Summary> {
    convert_on(&Task { disk: &Disk::default(), source, target, settings, observer, stop })
}

/// Converts a checkpoint onto a disk.
pub(super) fn convert_on(task: &Task<'_>) -> Result<Summary> {
    laid_out(task, |mut conversion| {
        let bytes = conversion.files.iter().map(|f| f.len).sum::<u64>() + conversion.beside.bytes;
        let order = conversion.order(task.settings.existing, bytes);
        let mut work = Work::begin(task.disk, &order, task.settings.request(&conversion.stamps))?;
        let needed = needed(conversion.plan, conversion.files.iter().flat_map(|file| &file.units));
        // A conversion that is continued after the first pass finds its results in the journal.
        match work.journal.amaxes.as_ref().filter(|amaxes| conversion.fits(amaxes, &needed)) {
            Some(amaxes) => conversion.amaxes = amaxes.clone(),
            None => {
                conversion.amaxes = conversion.find_amaxes(&needed)?;
                work.journal.amaxes = Some(conversion.amaxes.clone());
                work.note()?;
            }
        }
        conversion.write(work)
    })
}

impl<'p> Conversion<'_, 'p> {
    /// What is written, and where.
    pub fn order(&self, existing: Existing, bytes: u64) -> Order<'_> {
        let kind = self.settings.target.kind();
        Order { target: self.target, kind, existing, companions: &self.beside.companions, bytes }
    }

    fn write(&self, mut work: Work) -> Result<Summary> {
        self.copy_companions(&work)?;
        let unfinished: Vec<&Shard<'p>> = self.files.iter().filter(|f| !work.is_done(&f.file)).collect();
        let bytes = unfinished.iter().flat_map(|f| &f.units).map(|u| source_len(self.plan, u)).sum();
        self.observer.begin(Pass::Write, bytes);
        for file in unfinished {
            let sink = work.create(&file.file, file.len)?;
            self.write_frame(file, &sink)?;
            let measures = sink.flushed(|| self.write_units(&file.units, &sink))?;
            sink.finish()?;
            self.check_source()?;
            work.done(&file.file, measures)?;
        }
        self.conclude(work, || Ok(()))
    }

    /// Copies the tokenizer and other files.
    pub fn copy_companions(&self, work: &Work) -> Result<()> {
        let root = self.model.checkpoint.root();
        self.beside.companions.iter().try_for_each(|path| work.copy(&root.join(path), &path.to_string_lossy()))
    }

    /// What comes when all tensors are written. `last` comes before the result gets its name.
    pub fn conclude(&self, work: Work, last: impl FnOnce() -> Result<()>) -> Result<Summary> {
        for (name, bytes) in &self.beside.written {
            work.write(name, bytes)?;
        }
        self.check_source()?;
        let mut summary = self.summary(&work)?;
        last()?;
        if let Some(left) = work.finish(self.files.first().map_or("", |file| &file.file))? {
            let text = "the checkpoint that was replaced is still there, because it cannot be removed";
            summary.findings.push(Finding::note(left.display().to_string(), text));
        }
        Ok(summary)
    }

    /// Reads the result as a stranger would, before it has its name.
    fn read_back(&self, work: &Work) -> Result<(Vec<Finding>, Option<Finding>)> {
        let unreadable = |error: Error| Error::NotReadBack { error: Box::new(error) };
        match self.settings.target {
            Target::Gguf => {
                let file = gguf::GgufFile::open(&work.path(gguf::FILE)).map_err(unreadable)?;
                Ok((gguf::verify(&file).map_err(unreadable)?, None))
            }
            Target::Plain(_) => Checkpoint::open(work.folder()).map(|_| (Vec::new(), None)).map_err(unreadable),
            Target::ComfyUi => {
                let file = self.files.first().map_or("", |file| &file.file);
                let checkpoint = Checkpoint::open(&work.path(file)).map_err(unreadable)?;
                let model = Model::new(&checkpoint).map_err(unreadable)?;
                Ok((verify(&model, Client::ComfyUi, self.settings.threads).map_err(unreadable)?, None))
            }
            Target::ModelOpt | Target::CompressedTensors | Target::DeepSeekV4 => {
                let checkpoint = Checkpoint::open(work.folder()).map_err(unreadable)?;
                let model = Model::new(&checkpoint).map_err(unreadable)?;
                let loading = loading(&model, Client::Vllm);
                let unserved = loading.filter(|finding| finding.severity == Severity::Problem);
                let mut findings = verify(&model, Client::Vllm, self.settings.threads).map_err(unreadable)?;
                findings.retain(|finding| Some(finding) != unserved.as_ref());
                Ok((findings, unserved))
            }
        }
    }

    fn summary(&self, work: &Work) -> Result<Summary> {
        let measures = work.measures();
        let done = |item: &Item<'_>| {
            let measure = measures.get(item.weight.module.as_str())?;
            Some(self.finished(item, *measure))
        };
        let (mut quantized, mut rescaled, mut decoded) = (Vec::new(), Vec::new(), Vec::new());
        let mut plain = self.weighing.plain.clone();
        for weight in self.plan.items.iter().filter_map(done) {
            if weight.measure.unfactored > 0 {
                plain.insert(weight.module.clone(), "the Hessian of its inputs is not positive definite".to_string());
            }
            match weight.action {
                Action::Rescale => rescaled.push(weight),
                Action::Decode(_) => decoded.push(weight),
                _ => quantized.push(weight),
            }
        }
        let (findings, unserved) = self.read_back(work)?;
        Ok(Summary {
            outcome: work.outcome(),
            quantized,
            rescaled,
            decoded,
            before: self.model.checkpoint.byte_len(),
            after: shards::byte_len(&self.files),
            files: self.files.iter().map(|f| f.file.clone()).collect(),
            findings,
            plain,
            unserved,
        })
    }
}
