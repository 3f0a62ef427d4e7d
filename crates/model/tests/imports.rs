//! No two modules import each other.

#[test]
fn no_module_imports_what_imports_it() {
    let circles = nvfp4_testing::imports::circles(concat!(env!("CARGO_MANIFEST_DIR"), "/src"));
    assert!(circles.is_empty(), "{circles:#?}");
}
