//! Delayed scaling: a tensor's scale comes from the amaxes of earlier steps. Source: numerics
//! §14.4.
//!
//! A step quantizes with the scale that is there, [`record`]s the amax that it saw, and then
//! [`Delayed::update`]s the scale for the next one.

use super::Format;
use crate::{Error, Result};

/// Which amax of the history counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// The largest.
    #[default]
    Max,
    /// The last.
    MostRecent,
}

/// The two updates of TransformerEngine, which differ where the last amax is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Entry {
    /// One tensor alone. The history always moves on.
    Single,
    /// One tensor of many, after a reduction over devices. A last amax of 0 leaves history and
    /// scale as they are.
    Bulk {
        /// The reduced amax of this step, if there was a reduction; 0 stands for none.
        reduced: Option<f32>,
    },
}

/// How a scale follows from a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Delayed {
    /// What the scale is for.
    pub format: Format,
    /// Powers of two that are kept free above the largest magnitude.
    pub margin: i32,
    /// Which amax counts.
    pub algorithm: Algorithm,
}

/// Joins the amax of a tensor with those seen in this step, before any scaling.
pub fn record(history: &mut [f32], amax: f32) {
    if let Some(first) = history.first_mut() {
        *first = first.max(amax);
    }
}

impl Delayed {
    /// The scale of the next step. `history[0]` is the amax of this step, `history[1]` the oldest
    /// and the last one the newest before it. All move up by one, and `history[0]` is cleared.
    ///
    /// The scale stays where the amax is 0, infinite or NaN. NaN is passed over by a maximum.
    pub fn update(&self, history: &mut [f32], scale: f32, entry: Entry) -> Result<f32> {
        self.update_by(history, scale, entry, |window| match self.algorithm {
            Algorithm::Max => window.iter().fold(0.0, |m: f32, &a| m.max(a)),
            Algorithm::MostRecent => window[0],
        })
    }

    /// [`Delayed::update`] with the caller's rule instead of the algorithm. `amax` chooses a
    /// magnitude from the window: the amax of this step, then those of earlier steps, oldest first.
    pub fn update_by(
        &self,
        history: &mut [f32],
        scale: f32,
        entry: Entry,
        amax: impl FnOnce(&[f32]) -> f32,
    ) -> Result<f32> {
        let Some(&first) = history.first() else {
            return Err(Error::Length { what: "amax history (at least)", expected: 1, got: 0 });
        };
        let last = match entry {
            Entry::Bulk { reduced: Some(reduced) } if reduced != 0.0 => reduced,
            _ => first,
        };
        if last == 0.0 && matches!(entry, Entry::Bulk { .. }) {
            return Ok(finite(scale));
        }
        history[0] = last;
        let amax = amax(history);
        history.rotate_left(1);
        history[0] = 0.0;
        let usable = amax > 0.0 && amax.is_finite();
        Ok(finite(if usable { self.largest() / amax } else { scale }))
    }

    /// The magnitude that the amax is mapped to: `MAX · 2^(−margin)`.
    pub fn largest(&self) -> f32 {
        // Exact in binary64, where 2ⁿ has the bits (n + 1023)·2⁵²; beyond ±1000 binary32 has 0 and
        // ∞ only.
        let power = f64::from_bits(((1023 - i64::from(self.margin.clamp(-1000, 1000))) as u64) << 52);
        (f64::from(self.format.max()) * power) as f32
    }
}

fn finite(scale: f32) -> f32 {
    if scale == f32::INFINITY { f32::MAX } else { scale }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BULK: Entry = Entry::Bulk { reduced: None };

    fn after(rule: Delayed, history: &[f32], entry: Entry) -> (Vec<f32>, f32) {
        let mut history = history.to_vec();
        let scale = rule.update(&mut history, 5.0, entry).unwrap();
        (history, scale)
    }

    #[test]
    fn the_history_moves_up_and_the_largest_counts() {
        let max = Delayed::default();
        assert_eq!(after(max, &[2.0, 7.0, 3.0], Entry::Single), (vec![0.0, 3.0, 2.0], 64.0));
        let recent = Delayed { algorithm: Algorithm::MostRecent, margin: 1, ..max };
        assert_eq!(after(recent, &[2.0, 7.0, 3.0], BULK), (vec![0.0, 3.0, 2.0], 112.0));
        assert_eq!(after(max, &[2.0], BULK), (vec![0.0], 224.0));
        assert!(max.update(&mut [], 1.0, BULK).is_err());
    }

    #[test]
    fn a_last_amax_of_zero_stops_the_bulk_update_only() {
        let max = Delayed::default();
        assert_eq!(after(max, &[0.0, 7.0, 3.0], BULK), (vec![0.0, 7.0, 3.0], 5.0));
        assert_eq!(after(max, &[0.0, 7.0, 3.0], Entry::Single), (vec![0.0, 3.0, 0.0], 64.0));
        let reduced = |amax| Entry::Bulk { reduced: Some(amax) };
        assert_eq!(after(max, &[0.0, 7.0, 3.0], reduced(14.0)), (vec![0.0, 3.0, 14.0], 32.0));
        assert_eq!(after(max, &[2.0, 7.0, 3.0], reduced(0.0)), (vec![0.0, 3.0, 2.0], 64.0));
    }

    #[test]
    fn amaxes_that_are_no_numbers_keep_the_scale() {
        let (max, recent) = (Delayed::default(), Delayed { algorithm: Algorithm::MostRecent, ..Delayed::default() });
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        assert_eq!(after(max, &[2.0, inf, 3.0], BULK).1, 5.0);
        assert_eq!(after(recent, &[2.0, inf, 3.0], BULK).1, 224.0);
        assert_eq!(after(max, &[nan, 7.0, 3.0], BULK).1, 64.0);
        assert_eq!(after(recent, &[nan, 7.0, 3.0], BULK).1, 5.0);
        assert!(after(recent, &[nan, 7.0], BULK).0[1].is_nan(), "a NaN moves on like any amax");
    }

    #[test]
    fn scales_stay_finite() {
        let max = Delayed::default();
        assert_eq!(after(max, &[1e-40], Entry::Single).1, f32::MAX);
        assert_eq!(max.update(&mut [0.0], f32::INFINITY, BULK), Ok(f32::MAX));
        let roomy = Delayed { margin: 100, ..max };
        assert_eq!(after(roomy, &[448.0 * 2f32.powi(-100)], Entry::Single).1, 1.0);
    }

    #[test]
    fn a_rule_of_the_callers_sees_this_step_first_and_then_the_oldest() {
        let mut history = [2.0, 7.0, 3.0];
        let entry = Entry::Bulk { reduced: Some(4.0) };
        let mean = |window: &[f32]| {
            assert_eq!(window, [4.0, 7.0, 3.0]);
            window.iter().sum::<f32>() / window.len() as f32
        };
        let rule = Delayed { format: Format::E5m2, margin: 3, ..Delayed::default() };
        assert_eq!(rule.update_by(&mut history, 5.0, entry, mean), Ok(57344.0 / 8.0 / (14.0 / 3.0)));
        assert_eq!(history, [0.0, 3.0, 4.0]);
        // A tensor that was not seen is not asked about.
        assert_eq!(rule.update_by(&mut history, 5.0, BULK, |_| unreachable!()), Ok(5.0));
        assert!(rule.update_by(&mut [], 5.0, BULK, |_| 1.0).is_err());
        // One division, correctly rounded: not the reciprocal times the maximum.
        assert_eq!(after(Delayed::default(), &[3.0], BULK).1, 149.33333);
    }

    #[test]
    fn what_a_step_saw_is_joined() {
        let mut history = [2.0, 9.0];
        record(&mut history, 3.0);
        record(&mut history, f32::NAN);
        record(&mut history, 1.0);
        assert_eq!(history, [3.0, 9.0]);
        record(&mut [], 1.0);
    }
}
