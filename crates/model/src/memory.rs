//! How much memory a pass needs.

use crate::config::{Config, FeedForward};
use crate::mlp::ROWS;
use crate::projection::PANEL;
use crate::score::{POSITIONS, WORDS};
use crate::source::Source;
use nvfp4_checkpoint::{Stored, Weight};

/// The program, its threads' stacks and buffers.
pub const FIXED: u64 = 64 << 20;

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

/// Bytes of the largest part of a layer: attention, an MLP, or one expert.
pub fn layer(source: &Source<'_>) -> u64 {
    let part = |layer: usize, name: &str| -> u64 {
        let prefix = source.name(&format!("layers.{layer}.{name}."));
        let weights = source.model().weights.iter().filter(|w| w.module.starts_with(&prefix));
        weights.map(held).sum()
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
