//! What the parts of a product cost. The numbers steer the choice of a kernel (`choice.rs`); they
//! change no bound.

use super::shape::Chip;
use crate::cuda::Device;
use std::borrow::Cow;

/// Bytes that decoding an element of NVFP4 to bf16 reads and writes.
pub(super) const NVFP4_BYTES: f64 = 2.5625;
/// Bytes that quantization writes more for an element if it writes values instead of codes.
pub(super) const VALUE_BYTES: f64 = 1.4375;

/// What the parts of a product cost on a GPU: as shipped for its chip, or as [measured](Self::measure)
/// on it and kept in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// Nanoseconds that a block takes for 64 columns, for each shape of the chip.
    pub(super) steps: Cow<'static, [f64]>,
    /// Nanoseconds that sharing an output among blocks costs.
    pub(super) split: f64,
    /// What NVIDIA's library costs. Without it, products that the pipeline computes never go there.
    pub(super) library: Option<Library>,
}

/// What decoding both operands to bf16 and calling cuBLASLt costs, and what the pipeline does that
/// this way does not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Library {
    /// Nanoseconds that cuBLASLt's tile of 256 × 128 takes for 64 columns.
    pub step: f64,
    /// Bytes that the decoder moves in a nanosecond.
    pub bytes: f64,
    /// What the pipeline takes to bring a weight into order, in bytes that would take as long.
    pub prepared: f64,
    /// The same to decode an element of tokens.
    pub tokens: f64,
}

/// Measured on an H200 with N = K = 8192, cuBLASLt beside the last shape.
static HOPPER: Costs = Costs {
    steps: Cow::Borrowed(&[82.0, 92.0, 112.0, 132.0, 213.0, 700.0]),
    split: 1500.0,
    library: Some(Library { step: 652.0, bytes: 3900.0, prepared: 4.1, tokens: 4.9 }),
};

/// Every other GPU.
static PORTABLE: Costs =
    Costs { steps: Cow::Borrowed(&[100.0, 130.0, 200.0, 650.0, 1200.0]), split: 1500.0, library: None };

/// One cost, for people.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// What it is of.
    pub name: String,
    /// What it is counted in.
    pub unit: &'static str,
    /// How much it is.
    pub value: f64,
}

impl Costs {
    /// The costs that ship for a GPU.
    pub fn shipped(device: Device) -> &'static Costs {
        Costs::shipped_for(&Chip::of(device))
    }

    pub(super) fn shipped_for(chip: &Chip) -> &'static Costs {
        if chip.wgmma { &HOPPER } else { &PORTABLE }
    }

    /// Each of them with its name.
    pub fn list(&self, device: Device) -> Vec<Cost> {
        self.list_for(&Chip::of(device))
    }

    pub(super) fn list_for(&self, chip: &Chip) -> Vec<Cost> {
        let cost = |name: &str, unit, value| Cost { name: name.to_string(), unit, value };
        let steps = chip.shapes().iter().zip(self.steps.iter());
        let mut list: Vec<Cost> = steps.map(|(shape, &step)| cost(&format!("step {shape}"), "ns", step)).collect();
        list.push(cost("split", "ns", self.split));
        if let Some(library) = self.library {
            list.extend([
                cost("library step", "ns", library.step),
                cost("decode", "bytes/ns", library.bytes),
                cost("prepare a weight", "bytes", library.prepared),
                cost("decode a token", "bytes", library.tokens),
            ]);
        }
        list
    }

    /// The costs of a list; `None` if it has other names than those of the chip.
    pub(super) fn of_list(chip: &Chip, list: &[(&str, f64)]) -> Option<Costs> {
        let count = chip.shapes().len();
        let (steps, rest) = list.split_at_checked(count)?;
        let steps: Vec<f64> = steps.iter().map(|cost| cost.1).collect();
        let (split, library) = match *rest {
            [(_, split)] => (split, None),
            [(_, split), (_, step), (_, bytes), (_, prepared), (_, tokens)] => {
                (split, Some(Library { step, bytes, prepared, tokens }))
            }
            _ => return None,
        };
        let costs = Costs { steps: steps.into(), split, library };
        let names = costs.list_for(chip);
        names.iter().zip(list).all(|(own, given)| own.name == given.0).then_some(costs)
    }

    /// Whether a GPU may have these costs: none is negative, and nothing takes no time.
    pub fn is_plausible(&self) -> bool {
        let Library { step, bytes, prepared, tokens } = self.library.unwrap_or(NOTHING);
        let positive = |x: &f64| *x > 0.0 && x.is_finite();
        self.steps.iter().chain([&step, &bytes]).all(positive)
            && [self.split, prepared, tokens].iter().all(|x| *x >= 0.0 && x.is_finite())
    }
}

/// Plausible costs of no library.
const NOTHING: Library = Library { step: 1.0, bytes: 1.0, prepared: 0.0, tokens: 0.0 };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_costs_are_plausible_and_come_back_from_their_list() {
        for wgmma in [true, false] {
            let chip = Chip { wgmma, clusters: true, multiprocessors: 132, shared_memory: 232448 };
            let shipped = Costs::shipped_for(&chip);
            assert!(shipped.is_plausible());
            let list = shipped.list_for(&chip);
            assert_eq!(list.len(), chip.shapes().len() + if wgmma { 5 } else { 1 });
            let named: Vec<(&str, f64)> = list.iter().map(|cost| (&*cost.name, cost.value)).collect();
            assert_eq!(Costs::of_list(&chip, &named).as_ref(), Some(shipped));
            assert_eq!(Costs::of_list(&chip, &named[1..]), None);
            let other = Chip { wgmma: !wgmma, ..chip };
            assert_eq!(Costs::of_list(&other, &named), None, "shapes of another chip");
        }
    }

    #[test]
    fn costs_that_no_gpu_has_are_told() {
        let with = |change: fn(&mut Costs, &mut Library)| {
            let (mut costs, mut library) = (HOPPER.clone(), HOPPER.library.unwrap());
            change(&mut costs, &mut library);
            Costs { library: Some(library), ..costs }
        };
        for (costs, plausible) in [
            (with(|_, _| {}), true),
            (with(|costs, _| costs.split = 0.0), true),
            (with(|costs, _| costs.split = -1.0), false),
            (with(|costs, _| costs.steps.to_mut()[2] = 0.0), false),
            (with(|costs, _| costs.steps.to_mut()[5] = f64::NAN), false),
            (with(|_, library| library.bytes = f64::INFINITY), false),
            (with(|_, library| library.tokens = f64::NAN), false),
        ] {
            assert_eq!(costs.is_plausible(), plausible, "{costs:?}");
        }
    }
}
