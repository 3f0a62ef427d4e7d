//! What a build without features answers to a command that needs one.

#![cfg(not(any(feature = "train", feature = "cuda", feature = "baseline")))]

use std::process::Command;

#[test]
fn a_command_that_is_not_in_the_build_says_how_to_get_it() {
    for (args, message) in [
        ("train", "install it with `--features train`"),
        ("train --steps 5 --device cuda", "install it with `--features train`"),
        ("bench --device cuda", "--features cuda"),
        ("tune", "--features cuda"),
        ("eval model --text text --device cuda", "--device cuda: this build cannot use a GPU"),
        ("calibrate model --text text -o stats.safetensors --device cuda:1", "build it with `--features cuda`"),
        ("generate model --prompt text --device cuda", "build it with `--features cuda`"),
        ("bench gemm --m 1 --n 16 --k 16", "--features baseline"),
        ("bench linear --m 16 --n 16 --k 16", "--features baseline"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_nvfp4")).args(args.split(' ')).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(message), "{args}: {text}");
        assert_eq!(output.status.success(), message.contains("baseline"), "{args}: {text}");
    }
}
