//! Whether NVIDIA's library computes what this crate has not run on a chip: the first product of a
//! kind on a GPU is preceded by small ones with known sums.
//!
//! What is refused, or outside its bound, goes another way for the rest of the process, and a line
//! on stderr says so.

use super::blocks::Blocks;
use super::codes::Codes;
use super::cublas::Cublas;
use super::host::Copied;
use super::output::{Output, Product};
use super::product_kind::ProductKind;
use super::trial_data::{Factor, cases};
use crate::Result;
use crate::cuda::{Device, Error, Plain, Pool, Slice, Stream, Values, lock};
use half::bf16;
use nvfp4_spec::Element;
use nvfp4_spec::gemm::{Accumulate, Interval, Operand, Product as SpecProduct, Sums};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// What became of a kind of products on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The library computes them, within their bound.
    Used,
    /// The chip lacks the units.
    NotOnThisChip,
    /// The library is missing or does not compute them, for this reason.
    Refused(String),
    /// A product was outside its bound: which output, and by how much.
    Outside(String),
}

/// Verdicts of this process, by GPU and kind.
static KNOWN: Mutex<BTreeMap<(usize, ProductKind), Verdict>> = Mutex::new(BTreeMap::new());

/// Whether kinds are tried on chips that lack their units.
static ON_ANY_CHIP: AtomicBool = AtomicBool::new(false);

/// For tests: tries every kind on every chip from now on, so that one without the units shows what
/// becomes of a refusal.
#[doc(hidden)]
pub fn try_on_any_chip() {
    ON_ANY_CHIP.store(true, Ordering::Relaxed);
}

/// For tests: the verdict, if there is one yet.
#[doc(hidden)]
pub fn known(device: Device, kind: ProductKind) -> Option<Verdict> {
    lock(&KNOWN).get(&(device.ordinal(), kind)).cloned()
}

/// What becomes of a kind of products on a GPU. The first question is answered by small products,
/// which are waited for.
pub fn verdict(device: Device, kind: ProductKind) -> Verdict {
    verdict_and(device, kind, |_| {})
}

/// The chip on which this project has run the library's products of codes: Hopper. The model of
/// its FP8 sums was checked there.
const RUN_ON: (u32, u32) = (9, 0);

/// Whether products of a kind go to the library. On Hopper FP8 does without a trial. While a graph
/// is recorded from `stream` nothing can be tried, so what is unknown goes another way.
pub(super) fn allows(device: Device, kind: ProductKind, stream: Option<&Stream>) -> bool {
    let any = ON_ANY_CHIP.load(Ordering::Relaxed);
    if !any && device.capability() == RUN_ON {
        return RUN_ON >= kind.least();
    }
    if let Some(verdict) = known(device, kind) {
        return verdict == Verdict::Used;
    }
    if stream.is_some_and(Stream::is_capturing) {
        return false;
    }
    let say = |verdict: &Verdict| {
        let (ordinal, name) = (device.ordinal(), device.name());
        if let Some(reason) = explain(verdict) {
            let line = format!("nvfp4: GPU {ordinal} ({name}): {kind} products go another way: {reason}");
            // A product does not fail because nobody can be told.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    };
    verdict_and(device, kind, say) == Verdict::Used
}

/// Why a verdict sends products another way.
fn explain(verdict: &Verdict) -> Option<String> {
    match verdict {
        Verdict::Used => None,
        Verdict::NotOnThisChip => Some("the chip lacks the units".to_string()),
        Verdict::Refused(reason) => Some(reason.clone()),
        Verdict::Outside(reason) => Some(format!("cuBLASLt's are outside their bound: {reason}")),
    }
}

/// The verdict; `first` gets it if this call found it.
fn verdict_and(device: Device, kind: ProductKind, first: impl FnOnce(&Verdict)) -> Verdict {
    if !ON_ANY_CHIP.load(Ordering::Relaxed) && device.capability() < kind.least() {
        return Verdict::NotOnThisChip;
    }
    let Some(library) = Cublas::of(device) else {
        let reason = match device.portable() {
            true => "NVFP4_CUDA_PORTABLE is set".to_string(),
            false => Cublas::open(device).err().unwrap_or(Error::NoCublas).to_string(),
        };
        return Verdict::Refused(reason);
    };
    if let Some(verdict) = known(device, kind) {
        return verdict;
    }
    // Without the lock: while this thread waits for others of its pool, it may be given a product of
    // the same kind. Threads that ask at once try at once, and the first answer counts.
    let verdict = attempt(device, library, kind).unwrap_or_else(|error| Verdict::Refused(error.to_string()));
    match lock(&KNOWN).entry((device.ordinal(), kind)) {
        Entry::Occupied(known) => known.get().clone(),
        Entry::Vacant(unknown) => {
            first(&verdict);
            unknown.insert(verdict).clone()
        }
    }
}

/// What came of one product.
enum Outcome {
    Right,
    Refused,
    Wrong(String),
}

/// Computes the products of a kind. The library has to compute the first, and what it computes has to
/// be right.
fn attempt(device: Device, library: &'static Cublas, kind: ProductKind) -> Result<Verdict> {
    let stream = Stream::new(device)?;
    for (i, (a, b)) in cases(kind).iter().enumerate() {
        let mut outcomes = vec![multiply::<f32>(&stream, library, kind, (a, b), Epilogue::Plain)?];
        if i == 0 {
            outcomes.push(multiply::<bf16>(&stream, library, kind, (a, b), Epilogue::All)?);
        }
        for (j, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Outcome::Right => {}
                Outcome::Wrong(reason) => return Ok(Verdict::Outside(reason)),
                Outcome::Refused if (i, j) != (0, 0) => {}
                Outcome::Refused => {
                    return Ok(Verdict::Refused(format!("cuBLASLt {} does not compute them here", library.version())));
                }
            }
        }
    }
    Ok(Verdict::Used)
}

/// What is done with sums.
#[derive(Clone, Copy, PartialEq)]
enum Epilogue {
    Plain,
    /// α, a bias and β·C.
    All,
}

/// Types of outputs, as a bias.
trait Typed: Element + Plain {
    fn values(of: Slice<'_, Self>) -> Values<'_>;
}

impl Typed for f32 {
    fn values(of: Slice<'_, f32>) -> Values<'_> {
        Values::F32(of)
    }
}

impl Typed for bf16 {
    fn values(of: Slice<'_, bf16>) -> Values<'_> {
        Values::Bf16(of)
    }
}

/// One product by the library, compared with the exact sums.
fn multiply<T: Typed>(
    stream: &Stream,
    library: &'static Cublas,
    kind: ProductKind,
    (a, b): (&Factor, &Factor),
    epilogue: Epilogue,
) -> Result<Outcome> {
    let (left, right): (Operand<'_>, Operand<'_>) = (a.operand(), b.operand());
    let (m, n) = (left.rows(), right.rows());
    let extra = |len: usize| -> Vec<T> { (0..len).map(|i| T::from_f32((i % 61) as f32 / 8.0 - 3.0)).collect() };
    let (bias, c) = (extra(n), extra(m * n));
    let wide: Vec<f32> = bias.iter().map(|x| x.to_f32()).collect();
    let all = epilogue == Epilogue::All;
    let (alpha, beta, accumulator) = (if all { 1.7 } else { 1.0 }, 0.3, kind.accumulator());

    let (a_there, b_there) = (Copied::new(stream, a.on_host())?, Copied::new(stream, b.on_host())?);
    let (bias_there, c_there) = (stream.to_device(&bias)?, stream.to_device(&c)?);
    let product = Product {
        epilogue: None,
        accumulator,
        alpha,
        bias: all.then(|| T::values(bias_there.slice())),
        add: all.then(|| (c_there.slice(), beta)),
    };
    let mut out = stream.to_device(&vec![T::from_f32(77.0); m * n])?;
    let (a_operand, b_operand) = (a_there.operand(), b_there.operand());
    let output = Output::new(&a_operand, &b_operand.into(), &product, out.slice_mut().address());
    let taken = match kind {
        ProductKind::Nvfp4 | ProductKind::Nvfp4RowScaled | ProductKind::Mxfp8 => {
            let way = Blocks::of(Some(library), a_operand, b_operand);
            way.map_or(Ok(false), |way| way.run(stream, &output, &Pool))?
        }
        ProductKind::Fp8Split | ProductKind::Fp8Fast => {
            let way = Codes::of(Some(library), stream.device(), a_operand, b_operand, &output);
            way.map_or(Ok(false), |way| way.run(stream, &output, &Pool))?
        }
    };
    if !taken {
        return Ok(Outcome::Refused);
    }
    let mut got = vec![T::from_f32(0.0); m * n];
    stream.download(out.slice(), &mut got)?;
    let exact = SpecProduct {
        accumulate: Accumulate::Exact,
        accumulator,
        epilogue: None,
        alpha,
        bias: all.then_some(&wide[..]),
        add: all.then_some((&c[..], beta)),
    };
    Ok(compare(&left, &right, &exact, &got).map_or(Outcome::Right, Outcome::Wrong))
}

/// The first output outside its bound, as text.
fn compare<T: Element>(a: &Operand<'_>, b: &Operand<'_>, product: &SpecProduct<'_, T>, got: &[T]) -> Option<String> {
    let (n, sums) = (b.rows(), Sums::new(a, b, Accumulate::Exact));
    let interval = |at: usize| Interval::new((a, at / n), (b, at % n), product, &sums);
    let wrong = (0..got.len()).into_par_iter().find_first(|&at| !interval(at).holds(got[at].to_f32()))?;
    let Interval { exact, allowed } = interval(wrong);
    let (i, j) = (wrong / n, wrong % n);
    Some(format!("output ({i}, {j}) is {:?}, expected {exact:e} within {allowed:e}", got[wrong]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_spec::gemm::Accumulator;

    /// The sums of a case by binary32 multiply-adds, which is what the bound is for.
    #[test]
    fn right_products_pass_and_short_accumulators_do_not() {
        for kind in ProductKind::ALL {
            for (a, b) in cases(kind).iter().take(1) {
                let (a, b) = (a.operand(), b.operand());
                let product = SpecProduct::<f32> { accumulator: kind.accumulator(), ..SpecProduct::default() };
                let right = nvfp4_spec::gemm::gemm(a, b, &product).unwrap();
                assert_eq!(compare(&a, &b, &product, &right), None, "{kind}");
                // What a sum of 20 bits leaves of the first output, whose parts are 2²⁰ apart.
                let mut wrong = right.clone();
                wrong[0] = (f64::from(wrong[0]) * (1.0 - 256.0 * 2f64.powi(-20))) as f32;
                let precise = kind.accumulator() == Accumulator::Precise;
                assert_eq!(compare(&a, &b, &product, &wrong).is_some(), precise, "{kind}");
                let mut finite = right;
                if let Some(nan) = finite.iter_mut().find(|y| y.is_nan()) {
                    *nan = 0.0;
                }
                assert_eq!(compare(&a, &b, &product, &finite).is_some(), precise, "{kind}: NaN is lost");
            }
        }
    }
}
