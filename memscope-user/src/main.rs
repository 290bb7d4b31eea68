use std::process::ExitCode;

fn main() -> ExitCode {
    memscope::cli::main()
}
