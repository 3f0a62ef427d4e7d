//! Are the values that stay in high precision finite, and does a server read them? One NaN in a
//! norm makes every output NaN.

use super::dialect::Model;
use super::finding::Report;
use super::folder::Located;
use super::outline::Outline;
use super::place::beside_layers;
use super::pool;
use super::weight::{Stored, sized};
use crate::Result;
use half::{bf16, f16};
use nvfp4_spec::e8m0;
use safetensors::Dtype;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// Bytes that are read at once: whole elements of every type.
const PIECE: u64 = 4 << 20;
/// Elements that are tested together before one of them is searched for.
const RUN: usize = 4096;

/// Reports the first number of every tensor of floats that is NaN or infinite. Attention masks are
/// infinite on purpose.
pub(super) fn check(model: &Model<'_>, threads: usize, report: &mut Report) -> Result<()> {
    let plain = model.weights.iter().filter_map(|w| if let Stored::Plain(t) = w.stored { Some(t) } else { None });
    let float = |t: &Located<'_>| matches!(t.info.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32 | Dtype::F64);
    let powers = model
        .weights
        .iter()
        .filter_map(|w| if let Stored::MxFp4 { scales, .. } = w.stored { Some(scales) } else { None });
    let tensors: Vec<Located<'_>> = plain.chain(model.others.iter().copied()).filter(float).chain(powers).collect();
    let pieces = |(i, t): (usize, &Located<'_>)| (0..t.info.len).step_by(PIECE as usize).map(move |at| (i, at));
    let tasks: Vec<(usize, u64)> = tensors.iter().enumerate().flat_map(pieces).collect();
    let found: Vec<Mutex<Option<(u64, f64)>>> = tensors.iter().map(|_| Mutex::new(None)).collect();
    pool::run(threads, &tasks, &AtomicBool::new(false), |&(i, at), memory: &mut Vec<u8>| {
        let (tensor, dtype) = (&tensors[i], tensors[i].info.dtype);
        let bytes = sized(memory, (tensor.info.len - at).min(PIECE) as usize);
        tensor.read(at, bytes)?;
        let masked = tensor.info.name.contains("mask");
        if let Some((index, value)) = first(dtype, bytes).filter(|(_, value)| value.is_nan() || !masked) {
            let index = at / (dtype.bitsize() / 8) as u64 + index as u64;
            let mut found = found[i].lock().expect("no worker panics while it holds this");
            if found.is_none_or(|(first, _)| index < first) {
                *found = Some((index, value));
            }
        }
        Ok(())
    })?;
    for (tensor, found) in tensors.iter().zip(found) {
        if let Some((index, value)) = found.into_inner().expect("the workers are done") {
            let place = place(index, &tensor.info.shape);
            report.problem(&tensor.info.name, format!("the number at {place:?} is {value}: outputs become NaN"));
        }
    }
    Ok(())
}

/// A head that `tie_word_embeddings` says is the embedding, and is not: a server leaves it out.
pub(super) fn check_tied(model: &Model<'_>, report: &mut Report) -> Result<()> {
    let named = |last: &str| {
        model.weights.iter().find(|w| beside_layers(&w.module) == Some(last)).map(|w| (w.module.as_str(), &w.stored))
    };
    let tied = Outline::new(model.checkpoint.config()).tied() == Some(true);
    let (Some((head, own)), Some((_, Stored::Plain(table))), true) = (named("lm_head"), named("embed_tokens"), tied)
    else {
        return Ok(());
    };
    let same = match own {
        Stored::Plain(own) if own.info.dtype == table.info.dtype && own.info.len == table.info.len => same(own, table)?,
        // Numbers of another type may be the same ones.
        Stored::Plain(own) => own.info.dtype != table.info.dtype,
        _ => false,
    };
    if !same {
        let text = "not the embedding, though 'tie_word_embeddings' in config.json is true: a server leaves it out";
        report.problem(head, text);
    }
    Ok(())
}

/// Whether two tensors have the same bytes.
fn same(a: &Located<'_>, b: &Located<'_>) -> Result<bool> {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for at in (0..a.info.len).step_by(PIECE as usize) {
        let len = (a.info.len - at).min(PIECE) as usize;
        a.read(at, sized(&mut first, len))?;
        b.read(at, sized(&mut second, len))?;
        if first != second {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The index of an element in each dimension.
fn place(mut index: u64, shape: &[usize]) -> Vec<u64> {
    let mut place = vec![0; shape.len()];
    for (at, size) in place.iter_mut().zip(shape).rev() {
        *at = index % *size as u64;
        index /= *size as u64;
    }
    place
}

/// The first number that is NaN or infinite.
fn first(dtype: Dtype, bytes: &[u8]) -> Option<(usize, f64)> {
    match dtype {
        Dtype::BF16 => search(bytes.as_chunks().0, |b| u16::from_le_bytes(b) & 0x7F80 == 0x7F80)
            .map(|(i, b)| (i, bf16::from_le_bytes(b).to_f64())),
        Dtype::F16 => search(bytes.as_chunks().0, |b| u16::from_le_bytes(b) & 0x7C00 == 0x7C00)
            .map(|(i, b)| (i, f16::from_le_bytes(b).to_f64())),
        // Powers of two.
        Dtype::U8 | Dtype::F8_E8M0 => {
            search(bytes.as_chunks().0, |[b]| b == e8m0::NAN_BYTE).map(|(i, _)| (i, f64::NAN))
        }
        Dtype::F32 => search(bytes.as_chunks().0, |b| !f32::from_le_bytes(b).is_finite())
            .map(|(i, b)| (i, f64::from(f32::from_le_bytes(b)))),
        _ => {
            search(bytes.as_chunks().0, |b| !f64::from_le_bytes(b).is_finite()).map(|(i, b)| (i, f64::from_le_bytes(b)))
        }
    }
}

/// The first element for which it is true. A whole run is tested without a branch, which is several
/// times as fast.
fn search<const N: usize>(elements: &[[u8; N]], is: impl Fn([u8; N]) -> bool) -> Option<(usize, [u8; N])> {
    let run = elements.chunks(RUN).position(|run| run.iter().fold(false, |any, &element| any | is(element)))?;
    let at = run * RUN + elements[run * RUN..].iter().position(|&element| is(element))?;
    Some((at, elements[at]))
}
