//! How far one hidden state is from another.

use serde::{Deserialize, Serialize};

/// How a hidden state differs from the reference's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Drift {
    error: f64,
    signal: f64,
    own: f64,
    dot: f64,
}

impl Drift {
    /// Of a state from the reference's.
    pub fn of(reference: &[f32], state: &[f32]) -> Self {
        reference.iter().zip(state).fold(Drift::default(), |sum, (&a, &b)| {
            let (a, b) = (f64::from(a), f64::from(b));
            Drift {
                error: sum.error + (a - b) * (a - b),
                signal: sum.signal + a * a,
                own: sum.own + b * b,
                dot: sum.dot + a * b,
            }
        })
    }

    /// The norm of the difference over the norm of the reference.
    pub fn relative_error(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { (self.error / self.signal).sqrt() }
    }

    /// The cosine of the angle between both.
    pub fn cosine(&self) -> f64 {
        if self.error == 0.0 { 1.0 } else { self.dot / (self.signal * self.own).sqrt() }
    }
}
