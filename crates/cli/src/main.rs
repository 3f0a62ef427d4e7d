//! The program `nvfp4`: see the library beside it.

fn main() -> std::process::ExitCode {
    nvfp4_cli::main(std::env::args_os(), nvfp4_cli::Host::Program)
}
