"""`realm share` uploads a model or a workspace to the Hugging Face hub; `realm push` and `realm pull` use object storage."""

import argparse
from pathlib import Path

from realm.cli.arguments import Commands, Parser, add_command, report
from realm.cli.converting import add_card, numbers_of
from realm.errors import InputError


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the commands."""
    share = add_command(
        commands,
        _share,
        "upload a model with its card, or a workspace with its documents, to the Hugging Face hub",
        'realm share me/town-answers --model qa --licence apache-2.0 --data "Our wiki of 2026."',
        reports=True,
    )
    share.add_argument(
        "name", metavar="OWNER/NAME", help="repository on the hub; it is created if it does not exist"
    )
    share.add_model()
    share.add_kb(required=False)
    add_card(share)
    share.add_switch(
        "--documents", "with --in or --kb: also upload the knowledge base, with the texts of all documents"
    )
    share.add_switch(
        "--public",
        "let everybody read a repository that this command creates (default: the repository is private); also needed to "
        "upload to a repository that everybody can read",
    )
    push = add_command(
        commands,
        _push,
        "copy a knowledge base, a model or a workspace to object storage",
        "realm push kb s3://bucket/kb",
        reports=True,
        continues=True,
    )
    push.add_argument("folder", metavar="FOLDER", help="knowledge base, model or workspace")
    push.add_argument("address", metavar="ADDRESS", help="address that only this copy uses (s3:// or gs://)")
    pull = add_command(
        commands,
        _pull,
        "copy from object storage what `realm push` copied to it; the same command later fetches a new version",
        "realm pull s3://bucket/kb kb",
        reports=True,
        continues=True,
    )
    pull.add_argument("address", metavar="ADDRESS", help="address of the copy (s3:// or gs://)")
    pull.makes(
        pull.add_argument(
            "folder", metavar="FOLDER", help="folder to make, or folder that this command made earlier"
        )
    )


def _share(args: argparse.Namespace) -> None:
    if args.documents and args.kb is None:
        raise InputError(
            "--documents needs the knowledge base to upload: add --kb, or --in instead of --model"
        )
    if args.kb is not None and args.workspace is None and not args.documents:
        raise InputError("--kb can only be used with --documents, which uploads the texts of all documents")
    if args.name.count("/") != 1:
        raise InputError(f"{args.name} is not the name of a repository: write it like me/town-answers")
    numbers = numbers_of(args.numbers or [])

    from realm.interop.uploading import share

    kb = args.kb if args.documents else None
    report(args, share(args.model, kb, args.name, args.licence, args.data, numbers, args.public))


def _push(args: argparse.Namespace) -> None:
    from realm.interop.object_storage.copying import push

    report(args, push(Path(args.folder), args.address))


def _pull(args: argparse.Namespace) -> None:
    from realm.interop.object_storage.copying import pull

    report(args, pull(args.address, args.folder))
