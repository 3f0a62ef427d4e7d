//! Models whose own type is bf16.

use crate::cases::*;
use candle_core::DType;

/// Every module runs with parameters and activations in bf16, as far as candle's CPU has the operations: gradients are in bf16 too.
#[test]
fn parameters_in_bf16() {
    for kind in KINDS {
        for preset in ["nvfp4", "mxfp8", "current_scaling", "nvfp4_row_scaled"] {
            let case = Case::new(kind, DType::BF16, 3);
            case.session.apply(&recipe(preset)).unwrap();
            let outcome = case.run();
            assert!(outcome.y.iter().all(|y| f64::from_bits(*y).is_finite()), "{kind}, {preset}");
            let gradients = case.session.gradients().unwrap();
            assert_eq!(gradients.get(&case.x.var).unwrap().dtype(), DType::BF16);
        }
    }
}
