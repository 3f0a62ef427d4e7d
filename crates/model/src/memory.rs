//! How much memory a pass needs.

use crate::config::{Config, FeedForward};
use crate::matrix::PANEL;
use crate::mlp::ROWS;
use crate::score::{POSITIONS, WORDS};
use crate::source::Source;
use nvfp4_checkpoint::{Stored, Weight};

/// The program, its threads' stacks and buffers.
pub const FIXED: u64 = 64 << 20;

/// What NVIDIA's library works in.
const LIBRARY: u64 = 32 << 20;

/// Bytes of a weight in memory.
fn held(weight: &Weight<'_>) -> u64 {
    match &weight.stored {
        Stored::Plain(_) | Stored::Nvfp4(_) => weight.byte_len(),
        Stored::MxFp4 { .. } => 2 * weight.elements(),
        _ => 4 * weight.elements(),
    }
}

/// Whether a model has experts.
pub fn has_experts(source: &Source<'_>) -> bool {
    source.config().feed_forward.iter().any(|part| matches!(part, FeedForward::Experts(_)))
}

/// What of a layer's weights is in memory at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AtATime {
    /// All of a part: attention, an MLP, or one expert.
    Part,
    /// One, on its way to a GPU.
    Weight,
}

/// Bytes of the weights that are in the host's memory at a time.
pub fn weights(source: &Source<'_>) -> u64 {
    layer(source, if source.place().gpu_rows().is_some() { AtATime::Weight } else { AtATime::Part })
}

/// Bytes of the weights of a layer that are in memory at a time, of the largest layer.
fn layer(source: &Source<'_>, at_a_time: AtATime) -> u64 {
    let part = |layer: usize, name: &str| -> u64 {
        let prefix = source.name(&format!("layers.{layer}.{name}."));
        let weights = source.model().weights.iter().filter(|w| w.module.starts_with(&prefix)).map(held);
        match at_a_time {
            AtATime::Part => weights.sum(),
            AtATime::Weight => weights.max().unwrap_or(0),
        }
    };
    let config = source.config();
    let parts = config.feed_forward.iter().enumerate().map(|(layer, feed_forward)| {
        let mlp = match feed_forward {
            FeedForward::Dense(_) => part(layer, "mlp"),
            // Plain ones in one tensor are binary32 when they are turned.
            FeedForward::Experts(experts) => 8 * 3 * (experts.width * config.hidden) as u64,
        };
        part(layer, "self_attn").max(mlp)
    });
    parts.max().unwrap_or(0)
}

/// Bytes of a GPU that a model of this many tokens takes beside the driver's: the largest part of a
/// layer, and the inputs and outputs of a product with what is made of them. A product of NVFP4 may
/// decode both sides to bf16. None if products are computed on the CPU.
pub fn gpu(source: &Source<'_>, tokens: usize) -> Option<u64> {
    let rows = source.place().gpu_rows()?.min(tokens) as u64;
    let layers = source.name("layers.");
    let weights = source.model().weights.iter().filter(|w| w.module.starts_with(&layers));
    let product = |w: &Weight<'_>| {
        let (outputs, inputs) = ((w.rows / w.matrices().max(1)) as u64, w.cols as u64);
        let decoded = match w.stored {
            Stored::Nvfp4(_) => 2 * inputs * (rows + outputs) + LIBRARY,
            _ => 0,
        };
        4 * rows * (inputs + outputs) + decoded
    };
    let config = source.config();
    let logits = 4 * (WORDS * config.hidden + POSITIONS * (WORDS + config.hidden)) as u64;
    Some((layer(source, AtATime::Part) + weights.map(product).max().unwrap_or(0)).max(logits))
}

/// Bytes of what is computed of a row of this length, of rows in an MLP, and of logits; the largest.
pub fn row(config: &Config, length: usize) -> u64 {
    let heads = (config.heads + 2 * config.kv_heads) * config.head_dim;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let attention = length * (4 * heads + 3 * config.hidden) + threads * 256 * length;
    let width = config.feed_forward.iter().map(|part| match part {
        FeedForward::Dense(width) => *width,
        FeedForward::Experts(experts) => experts.width,
    });
    let mlp = ROWS * (4 * width.max().unwrap_or(0) + 3 * config.hidden);
    let logits = 3 * WORDS * config.hidden + 4 * POSITIONS * (WORDS + config.hidden);
    4 * (attention.max(mlp).max(logits) + 2 * PANEL) as u64
}
