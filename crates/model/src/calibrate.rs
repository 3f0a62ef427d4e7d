//! What goes through a model on a text: the largest activations, their squares, experts, keys and
//! values.

use crate::Result;
use crate::decoder::{Decoder, Rows};
use crate::evaluate::Progress;
use crate::hessian::{Collected, Hessians};
use crate::linear::{Activations, KeysValues, Run, Watch};
use crate::source::Source;
use nvfp4_checkpoint::{Moments, fused};
use nvfp4_spec::BLOCK;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// Bins per doubling of a histogram of blocks, and the exponent of the first.
const BINS: f32 = 32.0;
const FIRST: f32 = -40.0;

/// The input of a module.
#[derive(Clone, Debug, Default)]
struct Seen {
    amax: f32,
    rows: u64,
    squares: Vec<f64>,
    /// Blocks of 16 by the logarithm of their largest magnitude.
    blocks: Vec<u64>,
}

impl Seen {
    fn take(&mut self, x: &[f32], cols: usize) {
        self.squares.resize(cols, 0.0);
        self.blocks.resize((80.0 * BINS) as usize, 0);
        for row in x.chunks_exact(cols) {
            self.rows += 1;
            self.squares.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
            for block in row.chunks(BLOCK) {
                let most = block.iter().fold(0f32, |most, x| most.max(x.abs()));
                self.amax = self.amax.max(most);
                if most > 0.0 {
                    let bin = ((most.log2() - FIRST) * BINS).clamp(0.0, self.blocks.len() as f32 - 1.0);
                    self.blocks[bin as usize] += 1;
                }
            }
        }
    }

    /// A magnitude that this share of blocks, in percent, stays below; no more than the largest.
    fn percentile(&self, share: f64) -> f32 {
        let wanted = (self.blocks.iter().sum::<u64>() as f64 * share / 100.0).ceil() as u64;
        let mut below = 0;
        for (bin, count) in self.blocks.iter().enumerate() {
            below += count;
            if below >= wanted {
                return (FIRST + (bin as f32 + 1.0) / BINS).exp2().min(self.amax);
            }
        }
        self.amax
    }
}

/// Statistics of a text.
pub struct Calibration {
    inputs: BTreeMap<String, Seen>,
    experts: BTreeMap<String, Vec<u64>>,
    caches: BTreeMap<String, (f32, f32)>,
    hessians: Collected,
    tokens: usize,
}

/// Collects them.
struct Collector(Mutex<Calibration>);

fn largest(values: &[f32], before: f32) -> f32 {
    values.iter().fold(before, |most, x| most.max(x.abs()))
}

impl Watch for Collector {
    fn input(&self, module: &str, x: &[f32], cols: usize) {
        let mut all = self.0.lock().expect("no holder panics");
        all.inputs.entry(module.to_string()).or_default().take(x, cols);
        all.hessians.take(module, x, cols);
    }

    fn routed(&self, module: &str, counts: &[u64]) {
        let mut all = self.0.lock().expect("no holder panics");
        let own = all.experts.entry(module.to_string()).or_insert_with(|| vec![0; counts.len()]);
        own.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }

    fn cached(&self, module: &str, keys: &[f32], values: &[f32]) {
        let mut all = self.0.lock().expect("no holder panics");
        let own = all.caches.entry(module.to_string()).or_default();
        *own = (largest(keys, own.0), largest(values, own.1));
    }
}

/// Runs a model on a text, in one pass.
pub fn calibrate(
    source: &Source<'_>,
    rows: &Rows,
    progress: &mut dyn Progress,
    stop: &AtomicBool,
) -> Result<Calibration> {
    calibrate_with(source, rows, Hessians::None, Path::new(""), progress, stop)
}

/// Runs a model on a text, in one pass, and also sums up products of columns, which wait on the disk
/// beside `output`.
pub fn calibrate_with(
    source: &Source<'_>,
    rows: &Rows,
    hessians: Hessians,
    output: &Path,
    progress: &mut dyn Progress,
    stop: &AtomicBool,
) -> Result<Calibration> {
    let (decoder, layers) = (Decoder::new(source), source.config().layers);
    let collector = Collector(Mutex::new(Calibration {
        inputs: BTreeMap::new(),
        experts: BTreeMap::new(),
        caches: BTreeMap::new(),
        hessians: Collected::new(hessians, output),
        tokens: 0,
    }));
    let run = Run { activations: Activations::Plain, keys_values: KeysValues::Plain, watch: &collector };
    let mut states = vec![decoder.embed(rows.tokens())?];
    progress.begin(layers as u64);
    for layer in 0..layers {
        decoder.advance(layer, rows, &mut states, &[run], stop)?;
        progress.advance(1, &format!("layer {}", layer + 1));
    }
    let mut found = collector.0.into_inner().expect("no holder panics");
    found.hessians.finish()?;
    found.tokens = rows.tokens().len();
    Ok(found)
}

/// What experts of a layer that do the same share: `model.layers.3.mlp.experts` and `gate/up`.
fn shared(module: &str) -> Option<(String, String)> {
    let (layer, rest) = module.split_once(".experts.")?;
    let (number, last) = rest.split_once('.')?;
    number.parse::<usize>().ok()?;
    let kind = fused(module).map_or(last.to_string(), |(_, kind)| kind.to_string());
    Some((layer.to_string(), kind))
}

impl Calibration {
    /// How many tokens went through.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Modules whose input was seen.
    pub fn modules(&self) -> usize {
        self.inputs.len()
    }

    /// Experts that saw no token, by layer.
    pub fn unseen(&self) -> BTreeMap<&str, usize> {
        let none = |counts: &Vec<u64>| counts.iter().filter(|&&count| count == 0).count();
        self.experts.iter().map(|(module, counts)| (module.as_str(), none(counts))).filter(|(_, n)| *n > 0).collect()
    }

    /// The largest input of every module. Experts of a layer that do the same share one, also with
    /// those that saw no token.
    pub fn amaxes(&self, source: &Source<'_>) -> BTreeMap<String, f32> {
        let mut groups: BTreeMap<(String, String), f32> = BTreeMap::new();
        for (module, seen) in &self.inputs {
            if let Some(group) = shared(module) {
                let most = groups.entry(group).or_default();
                *most = most.max(seen.amax);
            }
        }
        let mut amaxes: BTreeMap<String, f32> =
            self.inputs.iter().map(|(module, seen)| (module.clone(), seen.amax)).collect();
        for weight in &source.model().weights {
            if let Some(most) = shared(&weight.module).and_then(|group| groups.get(&group)) {
                amaxes.insert(weight.module.clone(), *most);
            }
        }
        amaxes
    }

    /// Writes a file of statistics, with the magnitude that `percentile` percent of blocks stay
    /// below.
    pub fn save(&self, path: &Path, source: &Source<'_>, percentile: f64) -> Result<()> {
        let mut vectors: Vec<(String, Vec<f32>)> = Vec::new();
        for (module, amax) in self.amaxes(source) {
            vectors.push((format!("{module}{}", Moments::AMAX), vec![amax]));
        }
        for (module, seen) in &self.inputs {
            vectors.push((format!("{module}.input_percentile"), vec![seen.percentile(percentile)]));
            let mean = seen.squares.iter().map(|sum| (sum / seen.rows.max(1) as f64) as f32).collect();
            vectors.push((format!("{module}{}", Moments::MEAN_SQUARES), mean));
        }
        for (module, counts) in &self.experts {
            vectors.push((
                format!("{module}{}", Moments::EXPERT_TOKENS),
                counts.iter().map(|&count| count as f32).collect(),
            ));
        }
        for (module, (keys, values)) in &self.caches {
            vectors.push((format!("{module}.k_scale"), vec![keys / 448.0]));
            vectors.push((format!("{module}.v_scale"), vec![values / 448.0]));
        }
        let same = &self.hessians.same;
        let about = json!({ "version": 1, "tokens": self.tokens, "percentile": percentile, "same_input": same });
        self.hessians.save(path, &vectors, Moments::MARK, &about.to_string())
    }
}

/// The largest input of every module, from a file of statistics.
pub fn amaxes(path: &Path) -> Result<BTreeMap<String, f32>> {
    Moments::open(path)?.amaxes()
}

/// The scales of keys and values of every attention, such as `model.layers.0.self_attn.k_scale`,
/// from a file of statistics.
pub fn cache_scales(path: &Path) -> Result<BTreeMap<String, f32>> {
    Moments::open(path)?.cache_scales()
}
