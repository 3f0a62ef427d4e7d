//! Every operation of a quantized tensor, and what it refuses.

use half::{bf16, f16};
use nvfp4::*;
use nvfp4_spec::Element;

const ROWS: usize = 48;
const COLS: usize = 64;

fn values(seed: usize) -> Vec<f32> {
    (0..ROWS * COLS).map(|i| ((i * 7919 + seed * 104729) % 2003) as f32 / 64.0 - 15.0).collect()
}

fn quantize(quantizer: &Quantizer, seed: usize) -> QuantTensor {
    quantizer.quantize(&TensorRef::new(&values(seed)[..], &[ROWS, COLS]).unwrap()).unwrap()
}

fn settings() -> QuantizerBuilder {
    Quantizer::builder().directions(Directions::Both)
}

fn both() -> Quantizer {
    settings().build().unwrap()
}

fn per_row() -> Quantizer {
    settings().global_scale(GlobalScale::PerRow).build().unwrap()
}

#[test]
fn dequantize_gives_each_direction_in_each_type() {
    let q = quantize(&both(), 1);
    let row = q.dequantize::<f32>(Side::Row).unwrap();
    let col = q.dequantize::<f32>(Side::Column).unwrap();
    let x = values(1);
    let largest = x.iter().fold(0f32, |m, x| m.max(x.abs()));
    for (r, c) in (0..ROWS).flat_map(|r| (0..COLS).map(move |c| (r, c))) {
        let i = r * COLS + c;
        // A code is within 1/6 of its block's largest magnitude, plus the rounding of the scale by 1/16.
        assert!((row[i] - x[i]).abs() <= largest / 4.0 && (col[c * ROWS + r] - x[i]).abs() <= largest / 4.0);
    }
    let as_bf16: Vec<bf16> = row.iter().map(|&x| Element::from_f32(x)).collect();
    let as_f16: Vec<f16> = row.iter().map(|&x| Element::from_f32(x)).collect();
    assert_eq!(q.dequantize::<bf16>(Side::Row).unwrap(), as_bf16);
    assert_eq!(q.dequantize::<f16>(Side::Row).unwrap(), as_f16);
    let row_only = quantize(&Quantizer::default(), 1);
    let message = row_only.dequantize::<f32>(Side::Column).unwrap_err().to_string();
    assert_eq!(message, "there is no column direction; quantize again with it");
}

#[test]
fn update_in_place_equals_a_fresh_quantization() {
    for quantizer in [both(), per_row(), settings().layout(Layout::Swizzled).build().unwrap()] {
        let mut q = quantize(&both(), 1);
        let x = values(2);
        let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
        quantizer.update(&mut q, &x, &Options::default(), Update::Apply).unwrap();
        assert_eq!(q, quantize(&quantizer, 2));
    }
}

#[test]
fn a_skipped_update_changes_nothing() {
    let (mut q, x) = (quantize(&both(), 1), values(2));
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    both().update(&mut q, &x, &Options::default(), Update::Skip).unwrap();
    assert_eq!(q, quantize(&both(), 1));
}

#[test]
fn an_update_writes_only_the_directions_that_are_there() {
    let (mut q, x) = (quantize(&both(), 1), values(2));
    q.keep(Directions::Column).unwrap();
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    both().update(&mut q, &x, &Options::default(), Update::Apply).unwrap();
    assert_eq!((q.row(), q.col()), (None, quantize(&both(), 2).col()));
}

#[test]
fn a_refused_update_changes_nothing() {
    let mut q = quantize(&both(), 1);
    let mut x = values(2);
    let other = TensorRef::new(&x[..], &[COLS, ROWS]).unwrap();
    let error = both().update(&mut q, &other, &Options::default(), Update::Apply).unwrap_err();
    assert_eq!(error.to_string(), "expected the shape [48, 64], got [64, 48]");
    let same = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    let error = Quantizer::default().update(&mut q, &same, &Options::default(), Update::Apply).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the tensor holds a column direction, which the quantizer does not produce; \
         use a quantizer with `Directions::Both`, or drop the direction with `keep`"
    );
    let wrong_amax = Options { col_amax: Some(&[1.0, 2.0]), ..Options::default() };
    assert!(both().update(&mut q, &same, &wrong_amax, Update::Apply).is_err());
    x[5] = f32::NAN;
    let strict = settings().check_finite().build().unwrap();
    let nan = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    assert!(strict.update(&mut q, &nan, &Options::default(), Update::Apply).is_err());
    assert_eq!(q, quantize(&both(), 1));
}

#[test]
fn an_update_needs_a_quantizer_that_produces_the_row_direction_too() {
    let mut q = quantize(&both(), 1);
    let column = Quantizer::builder().directions(Directions::Column).build().unwrap();
    let x = values(2);
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    for update in [Update::Apply, Update::Skip] {
        let error = column.update(&mut q, &x, &Options::default(), update).unwrap_err();
        assert!(matches!(error, Error::NotProduced(Side::Row)), "{error}");
        assert_eq!(q, quantize(&both(), 1));
    }
    q.keep(Directions::Column).unwrap();
    column.update(&mut q, &x, &Options::default(), Update::Apply).unwrap();
    assert_eq!(q.col(), quantize(&both(), 2).col());
}

#[test]
fn keep_drops_a_direction_and_refuses_one_that_is_gone() {
    let mut q = quantize(&both(), 1);
    q.keep(Directions::Both).unwrap();
    q.keep(Directions::Row).unwrap();
    assert_eq!((q.row(), q.col()), (quantize(&both(), 1).row(), None));
    for gone in [Directions::Column, Directions::Both] {
        assert!(matches!(q.keep(gone), Err(Error::MissingDirection(Side::Column))));
        assert!(q.row().is_some(), "a refused request changes nothing");
    }
}

#[test]
fn a_row_slice_has_the_bytes_of_the_whole() {
    for layout in [Layout::Linear, Layout::Swizzled] {
        let quantizer = settings().global_scale(GlobalScale::PerRow).layout(layout).build().unwrap();
        let whole = quantize(&quantizer, 1);
        let slice = whole.slice_rows(16, 48).unwrap();
        assert_eq!(slice.shape(), [32, COLS]);
        // With per-row scales the slice of the row direction equals the quantization of the slice.
        let x = values(1);
        let part = quantizer.quantize(&TensorRef::new(&x[16 * COLS..], &[32, COLS]).unwrap()).unwrap();
        assert_eq!(slice.row(), part.row());
        let decoded: Vec<f32> = whole.dequantize(Side::Column).unwrap();
        let expected: Vec<f32> = decoded.chunks(ROWS).flat_map(|row| &row[16..]).copied().collect();
        assert_eq!(slice.dequantize::<f32>(Side::Column).unwrap(), expected);
    }
}

#[test]
fn a_slice_at_a_ragged_end_has_consistent_directions() {
    let x = &values(1)[..17 * 20];
    let x = TensorRef::new(x, &[17, 20]).unwrap();
    for layout in [Layout::Linear, Layout::Swizzled] {
        for global in [GlobalScale::PerTensor, GlobalScale::PerRow] {
            let quantizer = settings().layout(layout).global_scale(global).build().unwrap();
            let whole = quantizer.quantize(&x).unwrap();
            let column: Vec<f32> = whole.dequantize(Side::Column).unwrap();
            for (start, end) in [(17, 17), (16, 17), (16, 16), (0, 17), (0, 0)] {
                let slice = whole.slice_rows(start, end).unwrap();
                let parts = QuantTensor::from_parts(&[end - start, 20], slice.row().cloned(), slice.col().cloned());
                assert_eq!(parts.unwrap(), slice);
                for d in [Side::Row, Side::Column].map(|side| slice.nvfp4(side).unwrap()) {
                    let (codes, scales, stored) = (d.codes().to_vec(), d.scales().to_vec(), d.stored().to_vec());
                    let checked: Result<Nvfp4Direction> =
                        Nvfp4Direction::from_parts(*d.description(), codes, scales, stored);
                    assert_eq!(&checked.unwrap(), d, "rows {start}..{end}, {layout:?}");
                }
                let expected: Vec<f32> = column.chunks(17).flat_map(|c| &c[start..end]).copied().collect();
                assert_eq!(slice.dequantize::<f32>(Side::Column).unwrap(), expected);
            }
        }
    }
}

#[test]
fn row_slices_between_blocks_need_the_row_direction_alone() {
    let mut q = quantize(&both(), 1);
    let message = q.slice_rows(3, 9).unwrap_err().to_string();
    assert!(message.starts_with("rows 3..9 cut a block of the column direction"), "{message}");
    q.keep(Directions::Row).unwrap();
    assert_eq!(
        q.slice_rows(3, 9).unwrap().dequantize::<f32>(Side::Row).unwrap(),
        q.dequantize::<f32>(Side::Row).unwrap()[3 * COLS..9 * COLS]
    );
    assert!(q.slice_rows(5, 5).unwrap().nvfp4(Side::Row).unwrap().codes().is_empty());
    assert_eq!(q.slice_rows(40, 49).unwrap_err().to_string(), "rows 40..49 are outside the tensor's 48 rows");
    assert!(matches!(q.slice_rows(9, 3), Err(Error::OutOfRange { .. })));
}

#[test]
fn byte_len_counts_codes_scales_and_global_scales() {
    let x = &values(1)[..35 * 19];
    let x = TensorRef::new(x, &[5, 7, 19]).unwrap();
    let quantize = |builder: QuantizerBuilder| builder.build().unwrap().quantize(&x).unwrap();
    // 35 rows of 10 bytes of codes and 2 scales; 19 columns of 18 bytes of codes and 3 scales.
    let both = Quantizer::builder().directions(Directions::Both);
    let q = quantize(both);
    assert_eq!([q.row().unwrap().byte_len(), q.col().unwrap().byte_len()], [35 * 12 + 4, 19 * 21 + 4]);
    assert_eq!(q.byte_len(), 35 * 12 + 4 + 19 * 21 + 4);
    assert_eq!(quantize(both.global_scale(GlobalScale::PerRow)).byte_len(), 35 * 16 + 19 * 25);
    assert_eq!(quantize(Quantizer::builder()).byte_len(), 35 * 12 + 4);
    assert_eq!(quantize(Quantizer::builder().layout(Layout::Swizzled)).byte_len(), 35 * 10 + 512 + 4);
}

#[test]
fn a_clone_has_the_same_bytes_and_its_own_memory() {
    let (q, mut clone) = (quantize(&both(), 1), quantize(&both(), 1).clone());
    assert_eq!(clone, q);
    let x = values(2);
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    both().update(&mut clone, &x, &Options::default(), Update::Apply).unwrap();
    assert_eq!(q, quantize(&both(), 1));
}

#[test]
fn the_three_products_of_a_linear_layer_use_the_right_directions() {
    let (x, w, dy) = (quantize(&both(), 1), quantize(&both(), 2), quantize(&both(), 3));
    // x and w are [48, 64]; dy is the gradient of y = x·wᵀ, [48, 48].
    let dy = both().quantize(&TensorRef::new(&dy.dequantize::<f32>(Side::Row).unwrap()[..48 * 48], &[48, 48]).unwrap());
    let dy = dy.unwrap();
    let decode = |d: &Direction| d.dequantize::<f32>().unwrap();
    let check = |a: &Direction, b: &Direction| {
        let y: Vec<f32> = matmul(a, b, &Product::default()).unwrap();
        let (da, db, k) = (decode(a), decode(b), a.cols());
        for (i, j) in (0..a.rows()).flat_map(|i| (0..b.rows()).map(move |j| (i, j))) {
            let terms = (0..k).map(|p| f64::from(da[i * k + p]) * f64::from(db[j * k + p]));
            let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, m), t| (s + t, m + t.abs()));
            assert!((f64::from(y[i * b.rows() + j]) - sum).abs() <= 12.0 * 2f64.powi(-24) * magnitude);
        }
        y.len()
    };
    let (row, col) = (Side::Row, Side::Column);
    assert_eq!(check(x.direction(row).unwrap(), w.direction(row).unwrap()), 48 * 48, "forward");
    assert_eq!(check(dy.direction(row).unwrap(), w.direction(col).unwrap()), 48 * 64, "input gradient");
    assert_eq!(check(dy.direction(col).unwrap(), x.direction(col).unwrap()), 48 * 64, "weight gradient");
    assert_eq!(x.matmul::<f32>(&w).unwrap().len(), 48 * 48);
}

#[test]
fn products_keep_per_row_scales_and_mix_profiles() {
    let (x, w) = (quantize(&per_row(), 1), quantize(&both(), 2));
    let exact = |a: &QuantTensor, b: &QuantTensor| -> f64 {
        let (a, b) = (a.dequantize::<f32>(Side::Row).unwrap(), b.dequantize::<f32>(Side::Row).unwrap());
        (0..COLS).map(|k| f64::from(a[k]) * f64::from(b[k])).sum()
    };
    for profile in [Profile::ModelOpt, Profile::LlmCompressor, Profile::TorchAo] {
        let other = quantize(&Quantizer::builder().profile(profile).build().unwrap(), 2);
        for (a, b) in [(&x, &w), (&x, &other), (&other, &x), (&other, &w), (&other, &other)] {
            let (y, expected) = (f64::from(a.matmul::<f32>(b).unwrap()[0]), exact(a, b));
            assert!((y - expected).abs() <= 1e-5 * expected.abs().max(100.0), "{profile:?}: {y} {expected}");
        }
    }
}

#[test]
fn products_use_the_row_scaled_epilogue_if_either_side_has_a_scale_per_row() {
    let (rows, tensor) = (quantize(&per_row(), 1), quantize(&both(), 2));
    for (a, b, default, other) in [
        (&rows, &tensor, Epilogue::RowScaled, Epilogue::Folded),
        (&tensor, &rows, Epilogue::RowScaled, Epilogue::Folded),
        (&rows, &rows, Epilogue::RowScaled, Epilogue::Folded),
        (&tensor, &tensor, Epilogue::Folded, Epilogue::RowScaled),
    ] {
        let with = |epilogue| {
            let product = Product { epilogue: Some(epilogue), ..Product::<f32>::default() };
            matmul(a.row().unwrap(), b.row().unwrap(), &product).unwrap()
        };
        assert_eq!(a.matmul::<f32>(b).unwrap(), with(default));
        assert_ne!(with(default), with(other), "the two epilogues round differently somewhere");
    }
}

#[test]
fn matmul_refuses_other_lengths_and_other_rotations() {
    let (q, rotated) = (quantize(&both(), 1), settings().transform(Transform::FixedSigns).build().unwrap());
    let rotated = quantize(&rotated, 1);
    let product = Product::<f32>::default();
    let message = |a: &Direction, b: &Direction| matmul(a, b, &product).unwrap_err().to_string();
    assert_eq!(message(q.row().unwrap(), q.col().unwrap()), "matmul: expected K = 64, got K = 48");
    assert!(message(q.col().unwrap(), rotated.col().unwrap()).contains("quantize both with the same transform"));
    assert!(matmul(rotated.col().unwrap(), rotated.col().unwrap(), &product).is_ok());
}

#[test]
fn every_implementation_decodes_and_multiplies_alike() {
    let (x, w) = (quantize(&per_row(), 1), quantize(&both(), 2));
    let (x, w) = (x.direction(Side::Row).unwrap(), w.direction(Side::Row).unwrap());
    for implementation in Implementation::available() {
        assert_eq!(x.dequantize_with::<f32>(implementation).unwrap(), x.dequantize::<f32>().unwrap());
        let product = Product::<f32>::default();
        assert_eq!(matmul_with(implementation, x, w, &product).unwrap(), matmul(x, w, &product).unwrap());
    }
}

#[test]
fn products_of_operands_without_elements_are_empty_or_too_large() {
    let empty = |rows| {
        let x = TensorRef::new(&[0f32; 0][..], &[rows, 0]).unwrap();
        Quantizer::default().quantize(&x).unwrap()
    };
    assert_eq!(empty(1 << 62).matmul::<f32>(&empty(0)).unwrap(), [0f32; 0]);
    assert_eq!(empty(2).matmul::<f32>(&empty(3)).unwrap(), [0f32; 6]);
    let message = empty(1 << 31).matmul::<f32>(&empty(1 << 31)).unwrap_err().to_string();
    assert_eq!(message, "a matrix of 2147483648 × 2147483648 elements is too large");
}

#[test]
fn tensors_are_made_from_parts_only_where_they_fit() {
    let q = quantize(&both(), 1);
    let (row, col) = (q.row().cloned(), q.col().cloned());
    assert_eq!(QuantTensor::from_parts(&[ROWS, COLS], row.clone(), col.clone()).unwrap(), q);
    let message = QuantTensor::from_parts(&[ROWS, COLS], col, None).unwrap_err().to_string();
    assert_eq!(message, "expected the shape [48, 64], got [64, 48]");
    assert!(QuantTensor::from_parts(&[usize::MAX, 2, 0], row, None).is_err());
    assert!(matches!(<QuantTensor>::from_parts(&[ROWS, COLS], None, None), Err(Error::NoDirection)));
    let about = Nvfp4Description {
        rows: 2,
        cols: 32,
        global: GlobalScale::PerTensor,
        unit: Unit::Amax(Bound::E448),
        rotation: None,
        layout: Layout::Linear,
    };
    let part = |codes, scales, global, stored| -> Result<Nvfp4Direction> {
        let about = Nvfp4Description { global, ..about };
        Nvfp4Direction::from_parts(about, vec![0; codes], vec![0; scales], stored)
    };
    let (per_tensor, per_row) = (GlobalScale::PerTensor, GlobalScale::PerRow);
    assert!(part(32, 4, per_tensor, vec![1.0]).is_ok());
    let message = |r: Result<Nvfp4Direction>| r.unwrap_err().to_string();
    assert_eq!(message(part(31, 4, per_tensor, vec![1.0])), "codes: expected length 32, got 31");
    assert_eq!(message(part(32, 5, per_tensor, vec![1.0])), "scales: expected length 4, got 5");
    assert_eq!(message(part(32, 4, per_row, vec![1.0])), "global scale: expected length 2, got 1");
    assert_eq!(message(part(32, 4, per_row, vec![1.0, -0.5])), "amax: expected a magnitude, got -0.5 at index 1");
    let rotated = |cols: usize| {
        let (codes, scales) = (vec![0; 2 * cols.div_ceil(2)], vec![0; 2 * cols.div_ceil(16)]);
        let about = Nvfp4Description { cols, rotation: Some(Signs::FIXED), ..about };
        Nvfp4Direction::from_parts(about, codes, scales, vec![1.0])
    };
    let rows = QuantTensor::from_parts(&[2, 32], Some(rotated(32).unwrap().into()), None);
    assert!(matches!(rows, Err(Error::RotatedRow)));
    assert!(QuantTensor::from_parts(&[32, 2], None, Some(rotated(32).unwrap().into())).is_ok());
    assert!(message(rotated(24)).ends_with("expected a multiple of 16, got 24"));
}

#[test]
fn a_plain_tensor_times_a_quantized_one_is_near_the_product_of_the_decoded_values() {
    let (x, w) = (values(3).iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>(), quantize(&both(), 4));
    let x = TensorRef::new(&x[..], &[ROWS, COLS]).unwrap();
    let y: Vec<f32> = matmul_plain(&x, w.row().unwrap(), &Product::default()).unwrap();
    let decoded = w.dequantize::<f32>(Side::Row).unwrap();
    for (at, &y) in y.iter().enumerate() {
        let (i, j) = (at / ROWS, at % ROWS);
        let products = (0..COLS)
            .map(|k| f64::from(bf16::from_f32(values(3)[i * COLS + k]).to_f32()) * f64::from(decoded[j * COLS + k]));
        let (sum, magnitude) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
        // The bound of the sum, and the roundings of decoding and scaling.
        let allowed = nvfp4_spec::gemm::bound(COLS, magnitude) + magnitude * 2f64.powi(-21);
        assert!((f64::from(y) - sum).abs() <= allowed, "({i}, {j}): {y} for {sum}");
    }
    let rotated = Quantizer::builder().directions(Directions::Both).transform(Transform::FixedSigns).build().unwrap();
    let column = quantize(&rotated, 5);
    let error = matmul_plain::<f32>(
        &TensorRef::new(&vec![1f32; 2 * ROWS][..], &[2, ROWS]).unwrap(),
        column.col().unwrap(),
        &Product::default(),
    );
    assert!(matches!(error, Err(Error::Rotation { left: None, right: Some(_) })));
}

#[test]
fn grouped_products_are_the_products_one_by_one() {
    let (a, b, c) = (quantize(&both(), 6), quantize(&both(), 7), quantize(&per_row(), 8));
    let empty = both().quantize(&TensorRef::new(&[0f32; 0][..], &[0, COLS]).unwrap()).unwrap();
    let pairs = [
        (a.row().unwrap(), b.row().unwrap()),
        (empty.row().unwrap(), b.row().unwrap()),
        (c.row().unwrap(), a.row().unwrap()),
    ];
    let together: Vec<Vec<f32>> = matmul_grouped(&pairs, &Product::default()).unwrap();
    assert_eq!(together.iter().map(Vec::len).collect::<Vec<_>>(), [ROWS * ROWS, 0, ROWS * ROWS]);
    for ((a, b), together) in pairs.iter().zip(&together) {
        assert_eq!(&matmul::<f32>(*a, *b, &Product::default()).unwrap(), together);
    }
}

#[test]
fn a_prepared_weight_multiplies_as_the_weight_does() {
    let w = quantize(&per_row(), 2);
    let w = w.row().unwrap();
    let block = w.to_block().unwrap();
    let made = PreparedWeight::new(w).unwrap();
    // Bytes that were kept, over the block of the weight.
    let kept = made.bytes().map(|bytes| PreparedWeight::over(w.in_block(ROWS, COLS, &block).unwrap(), bytes));
    for rows in [1, 4, 5] {
        let values = &values(1)[..rows * COLS];
        let x = both().quantize(&TensorRef::new(values, &[rows, COLS]).unwrap()).unwrap();
        let x = x.row().unwrap();
        let expected: Vec<f32> = matmul(x, w, &Product::default()).unwrap();
        for prepared in std::iter::once(&made).chain(&kept) {
            assert_eq!(matmul::<f32>(x, prepared, &Product::default()).unwrap(), expected);
        }
        // As the left operand it is the weight.
        let turned: Vec<f32> = matmul(&made, x, &Product::default()).unwrap();
        assert_eq!(turned, matmul::<f32>(w, x, &Product::default()).unwrap());
    }
    let mx = Quantizer::with_scales(&"mxfp8".parse::<QuantSpec>().unwrap(), Directions::Row, |_| None).unwrap();
    let mx = quantize(&mx, 3);
    let mx = mx.direction(Side::Row).unwrap();
    assert_eq!(PreparedWeight::new(mx).unwrap().bytes(), None, "NVFP4 alone has an order");
    if made.bytes().is_some() {
        let x = both().quantize(&TensorRef::new(&values(1)[..COLS], &[1, COLS]).unwrap()).unwrap();
        let short = PreparedWeight::over(w, &[0; 3]);
        let error = matmul::<f32>(x.row().unwrap(), &short, &Product::default()).unwrap_err();
        assert!(error.to_string().contains("prepared weight"), "{error}");
    }
}
