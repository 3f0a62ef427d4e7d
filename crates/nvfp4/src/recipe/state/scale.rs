//! The rule of delayed scaling: how a history of amaxes becomes the next scale.
//!
//! It is TransformerEngine's update after the reduction among workers (its "bulk" entry): one binary32 operation per step, and a
//! tensor that was not seen, whose amax is 0, keeps its history and its scale.

use crate::recipe::format::Delayed;

/// Moves a history on by one step and returns the next scale.
///
/// `history[0]` is the step under way, of which `last` is the amax among all workers; `history[1]` is the oldest step, and the
/// last place gets `last`. `amax` chooses a magnitude from the window: `last` first, then the older steps, oldest first. An amax
/// of 0, infinity or NaN leaves the scale as it is, and a scale that overflows becomes `f32::MAX`.
pub fn update(config: &Delayed, history: &mut [f32], last: f32, scale: f32, amax: impl Fn(&[f32]) -> f32) -> f32 {
    let mut chosen = 0.0;
    if last != 0.0 {
        history[0] = last;
        chosen = amax(history);
        history.rotate_left(1);
        history[0] = 0.0;
    }
    let next = match chosen.is_finite() && chosen > 0.0 {
        true => aim(config) / chosen,
        false => scale,
    };
    if next == f32::INFINITY { f32::MAX } else { next }
}

/// What an amax is mapped to: the code's maximum, shrunk by the margin. Exact.
fn aim(config: &Delayed) -> f32 {
    config.code().max() * 2f32.powi(-i32::from(config.margin()))
}

/// The largest of a window; NaN is not seen.
pub(super) fn max(window: &[f32]) -> f32 {
    window.iter().copied().fold(0.0, f32::max)
}

/// That of the last step.
pub(super) fn most_recent(window: &[f32]) -> f32 {
    window[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::format::Fp8Code;

    fn delayed() -> Delayed {
        Delayed::new(Fp8Code::E4m3).with_history(4).unwrap()
    }

    #[test]
    fn the_history_rolls() {
        let mut history = [9.0, 1.0, 2.0, 3.0];
        assert_eq!(update(&delayed(), &mut history, 7.0, 1.0, max), 448.0 / 7.0);
        assert_eq!(history, [0.0, 2.0, 3.0, 7.0], "the oldest step is forgotten");
        let mut one = [5.0];
        assert_eq!(update(&delayed(), &mut one, 5.0, 1.0, max), 448.0 / 5.0);
        assert_eq!(one, [0.0]);
    }

    #[test]
    fn the_window_has_the_oldest_step_until_it_is_rolled_out() {
        let mut history = [0.0, 100.0, 0.0, 0.0];
        assert_eq!(update(&delayed(), &mut history, 1.0, 1.0, max), 448.0 / 100.0);
        assert_eq!(update(&delayed(), &mut history, 1.0, 1.0, max), 448.0);
        let mut history = [0.0, 100.0, 0.0, 0.0];
        assert_eq!(update(&delayed(), &mut history, 1.0, 1.0, most_recent), 448.0);
    }

    #[test]
    fn margins_and_codes() {
        let config = Delayed::new(Fp8Code::E5m2).with_margin(3).unwrap();
        assert_eq!(update(&config, &mut [0.0; 4], 7.0, 1.0, max), 57344.0 / 8.0 / 7.0);
        // One division, correctly rounded: not the reciprocal times the maximum.
        assert_eq!(update(&delayed(), &mut [0.0; 4], 3.0, 1.0, max), 149.33333);
    }

    #[test]
    fn what_is_not_a_magnitude_keeps_the_scale() {
        let mut unseen = [0.0, 1.0, 2.0, 3.0];
        assert_eq!(update(&delayed(), &mut unseen, 0.0, 5.0, max), 5.0);
        assert_eq!(unseen, [0.0, 1.0, 2.0, 3.0], "an unseen tensor's history stays");
        assert_eq!(update(&delayed(), &mut [0.0; 4], f32::INFINITY, 5.0, max), 5.0);
        assert_eq!(update(&delayed(), &mut [0.0; 4], f32::NAN, 5.0, most_recent), 5.0);
        let mut history = [0.0, 0.0, 2.0, 0.0];
        assert_eq!(update(&delayed(), &mut history, f32::NAN, 5.0, max), 224.0, "max does not see NaN");
        assert!(history[3].is_nan());
    }

    #[test]
    fn a_scale_that_overflows_is_the_largest_number() {
        assert_eq!(update(&delayed(), &mut [0.0; 4], 1e-40, 1.0, max), f32::MAX);
        assert_eq!(update(&delayed(), &mut [0.0; 4], 0.0, f32::INFINITY, max), f32::MAX);
    }
}
